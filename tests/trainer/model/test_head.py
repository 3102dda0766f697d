"""The fused head against full logits, reference numbers, and its own promises."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.plain_head import plain_policy_distillation
from tests.trainer import vectors
from tests.trainer.losses.pencil import EVEN, FORWARD, MIDDLE, SURE, log
from trainer.errors import ShapeError, TrainerConfigError
from trainer.model.head import (
    FusedOutput,
    _in_one_dtype,
    fused_policy_distillation,
    head_outputs,
)
from trainer.model.logit_tile import CudaBackend, PortableBackend, backend_for

N, V, H = 37, 101, 16
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
JSD_CASES = [
    match.groups()
    for name in vectors.names("jsd_opsd_gkd")
    if (match := re.fullmatch(r"grad_(b([\d.]+)_t([\d.]+)_kNone)", name))
]


def make_case(dtype=torch.float64, device="cpu", *, n_tokens=N, vocab=V):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    leaves = (normal(n_tokens, H), normal(vocab, H), normal(vocab))
    inputs = {
        "target_ids_N": torch.randint(vocab, (n_tokens,), generator=generator).to(device),
        "teacher_hidden_N_H": normal(n_tokens, H),
        "teacher_weight_V_H": normal(vocab, H),
        "teacher_bias_V": normal(vocab),
        "divergence_weights_N": normal(n_tokens).abs(),
    }
    return [leaf.requires_grad_() for leaf in leaves], inputs


def clipped_policy_loss(n_tokens=N, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(n_tokens, generator=generator, dtype=torch.float64).to(device)
    old_shift = 0.3 * torch.randn(n_tokens, generator=generator, dtype=torch.float64).to(device)

    def loss(logps, rows):
        ratio = (logps - logps.detach() + old_shift[rows]).exp()
        advantage = advantages[rows]
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * advantage, clipped * advantage).sum() / n_tokens

    return loss


def gradients(output: FusedOutput, leaves: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(output.loss * scale, leaves))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_outputs_of_the_head_are_those_of_the_full_logits(softcap):
    (hidden, weight, bias), inputs = make_case()
    inputs.pop("divergence_weights_N")
    teacher = [inputs[f"teacher_{name}"] for name in ("hidden_N_H", "weight_V_H", "bias_V")]

    def full(hidden, weight, bias):
        logits = 0.9 * (hidden @ weight.T + bias)
        capped = logits if softcap is None else softcap * (logits / softcap).tanh()
        return (capped / 0.7).log_softmax(-1)

    ours, theirs = full(hidden, weight, bias), full(*teacher)
    options = {"beta": 0.0, "temperature": 0.7, "logit_scale": 0.9, "softcap": softcap}
    found = head_outputs(hidden, weight, bias, **inputs, **options, chunk=8)
    targets = inputs["target_ids_N"].unsqueeze(-1)
    torch.testing.assert_close(found.logps_N, ours.gather(-1, targets).squeeze(-1))
    torch.testing.assert_close(found.entropy_N, -(ours.exp() * ours).sum(-1))
    forward_kl = (theirs.exp() * (theirs - ours)).sum(-1)
    torch.testing.assert_close(found.divergence_N, forward_kl)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["fused", "recompute"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_fused_equals_full_logits_in_float64(beta, softcap, mode, device):
    leaves, inputs = make_case(device=device)
    inputs |= {"beta": beta, "softcap": softcap, "temperature": 0.7, "logit_scale": 0.9}
    inputs |= {"policy_loss": clipped_policy_loss(device=device)}
    fused = fused_policy_distillation(*leaves, **inputs, chunk=8, mode=mode)
    reference = plain_policy_distillation(*leaves, **inputs)
    for ours, theirs in zip(fused, reference, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)
    pairs = zip(gradients(fused, leaves, 2.5), gradients(reference, leaves, 2.5), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_fused_equals_full_logits_in_float32(mode, device):
    leaves, inputs = make_case(torch.float32, device)
    inputs |= {"policy_loss": clipped_policy_loss(device=device)}
    fused = fused_policy_distillation(*leaves, **inputs, mode=mode)
    reference = plain_policy_distillation(*leaves, **inputs)
    assert float((fused.loss - reference.loss).detach().abs()) < 1e-4
    for ours, theirs in zip(gradients(fused, leaves), gradients(reference, leaves), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize(("key", "beta", "temperature"), JSD_CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_divergence_and_gradient_match_the_reference_numbers(
    key, beta, temperature, dtype, tolerance
):
    def rows(name):
        return vectors.tensor("jsd_opsd_gkd", name).flatten(0, -2).to(dtype)

    # With the identity as its head, a model's hidden states are its logits.
    hidden, head = rows("student_logits").requires_grad_(), torch.eye(11, dtype=dtype)
    kept = vectors.tensor("jsd_opsd_gkd", "labels").flatten() != -100
    output = fused_policy_distillation(
        hidden,
        head,
        target_ids_N=torch.zeros(len(hidden), dtype=torch.long),
        teacher_hidden_N_H=rows("teacher_logits"),
        divergence_weights_N=kept.to(dtype) / kept.sum(),
        beta=float(beta),
        temperature=float(temperature),
        chunk=4,
    )
    pointwise = rows(f"pointwise_{key}").sum(-1)
    torch.testing.assert_close(output.divergence_N, pointwise, atol=tolerance, rtol=tolerance)
    (gradient,) = torch.autograd.grad(output.loss, hidden)
    torch.testing.assert_close(gradient, rows(f"grad_{key}"), atol=tolerance, rtol=tolerance)


def test_reference_numbers_are_all_there():
    assert len(JSD_CASES) == 15


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_every_output_of_the_head_passes_gradcheck(beta):
    leaves, inputs = make_case(n_tokens=5, vocab=7)
    inputs.pop("divergence_weights_N")

    def outputs(*leaves):
        return tuple(head_outputs(*leaves, **inputs, beta=beta, temperature=1.3, chunk=2))

    assert torch.autograd.gradcheck(outputs, leaves)


def test_fused_loss_passes_gradcheck():
    leaves, inputs = make_case(n_tokens=5, vocab=7)
    weight = torch.linspace(-1, 1, 5, dtype=torch.float64)

    def loss(*leaves):
        return fused_policy_distillation(
            *leaves,
            **inputs,
            policy_loss=lambda logps, rows: (logps.square() * weight[rows]).sum(),
            chunk=2,
        ).loss

    assert torch.autograd.gradcheck(loss, leaves)


def test_recompute_serves_losses_that_mix_tokens():
    leaves, inputs = make_case()
    sequences = torch.arange(N) // 6

    def sequence_level(logps, rows):
        assert rows == slice(0, N)
        sums = logps.new_zeros(7).index_add(0, sequences, logps)
        return -torch.nn.functional.logsigmoid(0.1 * sums).mean()

    inputs |= {"policy_loss": sequence_level}
    fused = fused_policy_distillation(*leaves, **inputs, chunk=8, mode="recompute")
    reference = plain_policy_distillation(*leaves, **inputs)
    for ours, theirs in zip(gradients(fused, leaves), gradients(reference, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_entropy_bonus_has_the_gradient_of_full_logits():
    leaves, inputs = make_case()
    inputs = {"target_ids_N": inputs["target_ids_N"]}
    ours = torch.autograd.grad(head_outputs(*leaves, **inputs, chunk=8).entropy_N.sum(), leaves)
    theirs = torch.autograd.grad(
        plain_policy_distillation(*leaves, **inputs).entropy_N.sum(), leaves
    )
    for our_gradient, their_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_gradient, their_gradient)


def test_equal_models_have_no_divergence_and_no_gradient():
    leaves, inputs = make_case()
    for beta in (0.0, 0.5, 1.0):
        output = fused_policy_distillation(
            *leaves, target_ids_N=inputs["target_ids_N"], teacher_hidden_N_H=leaves[0], beta=beta
        )
        assert float(output.divergence_N.abs().max()) < 1e-14
        assert max(float(g.abs().max()) for g in gradients(output, leaves)) < 1e-14


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_both_models_exclude_change_nothing(beta):
    leaves, inputs = make_case()
    hidden, weight, bias = leaves
    narrow = fused_policy_distillation(
        hidden,
        weight[:90],
        bias[:90],
        **inputs
        | {
            "target_ids_N": inputs["target_ids_N"] % 90,
            "teacher_weight_V_H": inputs["teacher_weight_V_H"][:90],
            "teacher_bias_V": inputs["teacher_bias_V"][:90],
        },
        beta=beta,
    )
    is_out = torch.arange(V) >= 90
    wide = fused_policy_distillation(
        hidden,
        weight,
        bias.masked_fill(is_out, -torch.inf),
        **inputs
        | {
            "target_ids_N": inputs["target_ids_N"] % 90,
            "teacher_bias_V": inputs["teacher_bias_V"].masked_fill(is_out, -torch.inf),
        },
        beta=beta,
    )
    torch.testing.assert_close(wide.loss, narrow.loss)
    torch.testing.assert_close(
        torch.autograd.grad(wide.loss, hidden), torch.autograd.grad(narrow.loss, hidden)
    )


def test_no_token_gives_zero_loss_and_zero_gradients():
    leaves, inputs = make_case(n_tokens=0)
    for mode in ("fused", "recompute"):
        output = fused_policy_distillation(
            *leaves, **inputs, policy_loss=lambda logps, _: logps.sum(), mode=mode
        )
        assert float(output.loss.detach()) == 0.0
        assert all(not gradient.any() for gradient in gradients(output, leaves))


def test_tokens_of_weight_zero_have_no_gradient():
    leaves, inputs = make_case()
    inputs["divergence_weights_N"][5:] = 0.0
    output = fused_policy_distillation(
        *leaves, **inputs, policy_loss=lambda logps, _: logps.new_zeros(())
    )
    hidden_gradient = gradients(output, leaves)[0]
    assert hidden_gradient[:5].abs().sum(-1).min() > 0
    assert not hidden_gradient[5:].any()


def test_frozen_head_gets_no_gradient_and_hidden_states_keep_theirs():
    (hidden, weight, bias), inputs = make_case()
    expected = gradients(fused_policy_distillation(hidden, weight, bias, **inputs), [hidden])
    weight.requires_grad_(requires_grad=False)
    bias.requires_grad_(requires_grad=False)
    fused_policy_distillation(hidden, weight, bias, **inputs).loss.backward()
    torch.testing.assert_close(hidden.grad, expected[0])
    assert weight.grad is None


def test_without_grad_the_numbers_are_the_same():
    leaves, inputs = make_case()
    inputs |= {"policy_loss": clipped_policy_loss()}
    with_grad = fused_policy_distillation(*leaves, **inputs)
    with torch.no_grad():
        without = fused_policy_distillation(*leaves, **inputs)
    assert not without.loss.requires_grad
    for ours, theirs in zip(without, with_grad, strict=True):
        torch.testing.assert_close(ours, theirs.detach())


def test_a_second_backward_pass_gives_the_same_gradient():
    leaves, inputs = make_case()
    output = fused_policy_distillation(*leaves, **inputs)
    first = torch.autograd.grad(output.loss, leaves, retain_graph=True)
    second = torch.autograd.grad(output.loss * 3.0, leaves)
    torch.testing.assert_close([3.0 * gradient for gradient in first], list(second))


def test_bf16_divergence_of_near_models_keeps_sign_and_size():
    # From logits rounded to 16 bits this value is noise, often negative.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 64, generator=generator)
    weight = 0.3 * torch.randn(1000, 64, generator=generator)
    teacher_hidden = hidden + 0.02 * torch.randn(64, 64, generator=generator)
    sides = [x.bfloat16() for x in (hidden, weight, teacher_hidden)]
    targets = torch.zeros(64, dtype=torch.long)
    inputs = {"target_ids_N": targets, "teacher_hidden_N_H": sides[2]}
    ours = fused_policy_distillation(*sides[:2], **inputs)
    wide = {"target_ids_N": targets, "teacher_hidden_N_H": sides[2].double()}
    exact = plain_policy_distillation(sides[0].double(), sides[1].double(), **wide)
    assert float(ours.divergence_N.min()) > 0
    torch.testing.assert_close(ours.divergence_N.double(), exact.divergence_N, rtol=1e-3, atol=0)


def test_bf16_weight_gradient_is_rounded_once_however_many_chunks():
    (hidden, weight, _), inputs = make_case(torch.bfloat16)
    weight = weight.detach().requires_grad_()
    targets = inputs["target_ids_N"]

    def summed(logps, _):
        return logps.sum()

    output = fused_policy_distillation(
        hidden, weight, target_ids_N=targets, policy_loss=summed, chunk=1
    )
    exact_weight = weight.detach().double().requires_grad_()
    exact = plain_policy_distillation(
        hidden.detach().double(), exact_weight, target_ids_N=targets, policy_loss=summed
    )
    ours = gradients(output, [weight])[0].double()
    expected = gradients(exact, [exact_weight])[0]
    assert ((ours - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


class LargestTensor(TorchDispatchMode):
    """Remembers the element count of the largest tensor that any operation returned."""

    n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.n_elements = max(self.n_elements, leaf.numel())
        return result


@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_the_logits_of_the_batch_never_exist(mode):
    leaves, inputs = make_case(torch.float32, n_tokens=512, vocab=200)
    inputs |= {"policy_loss": clipped_policy_loss(512), "mode": mode}
    with LargestTensor() as largest:
        fused_policy_distillation(*leaves, **inputs, chunk=32).loss.backward()
    assert largest.n_elements == max(512 * H, 32 * 200)
    with LargestTensor() as largest:
        del inputs["mode"]
        plain_policy_distillation(*leaves, **inputs).loss.backward()
    assert largest.n_elements == 512 * 200


class Buffers(TorchDispatchMode):
    """Remembers the shapes of tensors that were made like another one."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.zeros_like.default, torch.ops.aten.empty_like.default):
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("mode", ["fused", "recompute"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_has_no_room_for_one(frozen, mode):
    leaves, inputs = make_case()
    shapes = [tuple(leaf.shape) for leaf in leaves]
    leaves[frozen].requires_grad_(requires_grad=False)
    with Buffers() as made:
        fused_policy_distillation(*leaves, **inputs, chunk=8, mode=mode).loss.backward()
    assert made.shapes & set(shapes) == {*shapes[:frozen], *shapes[frozen + 1 :]}
    with Buffers() as made, torch.no_grad():
        fused_policy_distillation(*leaves, **inputs, chunk=8, mode=mode)
    assert not made.shapes & set(shapes)


def test_autocast_does_not_narrow_the_logits():
    leaves, inputs = make_case(torch.float32)
    plain = fused_policy_distillation(*leaves, **inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = fused_policy_distillation(*leaves, **inputs)
    assert torch.equal(plain.loss, under_autocast.loss)


def test_the_device_chooses_how_to_multiply():
    assert type(backend_for(torch.device("cuda"))) is CudaBackend
    assert type(backend_for(torch.device("cpu"))) is PortableBackend


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("is_on", [True, False])
def test_autocast_narrows_what_is_multiplied_on_cuda_alone(monkeypatch, device, is_on):
    is_asked, dtypes = {"cuda": is_on}, {"cuda": torch.bfloat16}
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: is_asked[device])
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtypes[device])
    with FakeTensorMode():
        hidden = torch.empty(3, H, dtype=torch.float16, device=device)
        weight, bias = (torch.empty(*shape, device=device) for shape in ((V, H), (V,)))
        found = _in_one_dtype(hidden, weight, bias)
    narrow = (torch.bfloat16, torch.bfloat16, torch.float32)
    as_given = (torch.float16, torch.float32, torch.float32)
    is_narrow = is_on and device == "cuda"
    assert tuple(one.dtype for one in found) == (narrow if is_narrow else as_given)
    assert [one.shape for one in found] == [hidden.shape, weight.shape, bias.shape]


def test_the_cuda_backend_computes_the_same(monkeypatch):
    leaves, inputs = make_case()
    inputs |= {"policy_loss": clipped_policy_loss()}
    expected = gradients(fused_policy_distillation(*leaves, **inputs), leaves)
    monkeypatch.setattr("trainer.model.head.backend_for", lambda _: CudaBackend())
    ours = gradients(fused_policy_distillation(*leaves, **inputs), leaves)
    torch.testing.assert_close(ours, expected)


def test_the_cuda_backend_keeps_32_bits_of_16_bit_products():
    backend = CudaBackend()
    hidden, weight = (torch.empty(n, H, dtype=torch.bfloat16, device="meta") for n in (N, V))
    logits = backend.project(hidden, weight, torch.float32)
    total = torch.zeros(V, H, device="meta")
    backend.accumulate_(total, logits, hidden)
    assert (logits.dtype, total.dtype) == (torch.float32, torch.float32)
    assert backend.pull_back(logits, weight).shape == hidden.shape


def test_the_cuda_backend_adds_16_bit_products_into_its_total(monkeypatch):
    """By kernels that only CUDA has, which multiply 16 bits and return 32."""

    def mm(left, right, *, out_dtype):
        assert left.dtype == right.dtype == torch.bfloat16
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(total, left, right, *, out_dtype, out):
        return torch.add(total, mm(left, right, out_dtype=out_dtype), out=out)

    (hidden, weight, _), _ = make_case(torch.bfloat16)
    hidden, weight = hidden.detach(), weight.detach()
    expected = hidden.float() @ weight.float().T
    backend, total = CudaBackend(), torch.ones(V, H)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", mm)
        patch.setattr(torch, "addmm", addmm)
        logits = backend.project(hidden, weight, torch.float32)
        backend.accumulate_(total, logits, hidden)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(total, 1 + expected.bfloat16().float().T @ hidden.float())


@pytest.mark.parametrize("mode", [{}, {"mode": "fused"}, {"mode": "recompute"}], ids=str)
def test_a_head_by_hand_with_nothing_but_its_defaults(mode):
    # With the identity as its head, these states are log-probabilities.
    student, teacher = log([EVEN, SURE]), log([SURE, SURE])
    inputs = {"target_ids_N": torch.tensor([0, 1]), "teacher_hidden_N_H": teacher}
    found = fused_policy_distillation(student, torch.eye(2).double(), **inputs, **mode)
    assert float(found.loss) == pytest.approx(MIDDLE / 2)
    assert found.logps_N.exp().tolist() == pytest.approx([0.5, 0.25])
    entropy = [math.log(2), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert found.entropy_N.tolist() == pytest.approx(entropy)
    assert found.divergence_N.tolist() == pytest.approx([MIDDLE, 0.0])
    outputs = head_outputs(student, torch.eye(2).double(), **inputs)
    for ours, theirs in zip(outputs, found[1:], strict=True):
        torch.testing.assert_close(ours, theirs)
    forward = head_outputs(student, torch.eye(2).double(), **inputs, beta=0.0)
    assert forward.divergence_N.tolist() == pytest.approx([FORWARD, 0.0])


@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_both_channels_add_up_and_either_may_be_off(mode):
    # With the identity as its head, these states are log-probabilities.
    student, teacher = log([EVEN, SURE]), log([SURE, SURE])
    targets = {"target_ids_N": torch.tensor([0, 1]), "mode": mode}
    distilled = {
        "teacher_hidden_N_H": teacher,
        "divergence_weights_N": torch.tensor([3.0, 5.0]),
    }
    policy = {"policy_loss": lambda logps, _: -logps.sum()}
    charged = math.log(2) + math.log(4)
    for options, expected in (
        ({}, 0.0),
        (policy, charged),
        (distilled, 3 * MIDDLE),
        (policy | distilled, charged + 3 * MIDDLE),
    ):
        hidden = student.clone().requires_grad_()
        found = fused_policy_distillation(hidden, torch.eye(2).double(), **targets, **options)
        assert float(found.loss.detach()) == pytest.approx(expected)
        (gradient,) = torch.autograd.grad(found.loss, hidden)
        assert bool(gradient.any()) == bool(options)
        if "teacher_hidden_N_H" not in options:
            assert found.divergence_N.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_a_teacher_without_a_head_takes_the_students_and_its_bias(mode):
    (hidden, weight, bias), inputs = make_case()
    shared = {
        "target_ids_N": inputs["target_ids_N"],
        "teacher_hidden_N_H": inputs["teacher_hidden_N_H"],
    }
    own = {"teacher_weight_V_H": weight, "teacher_bias_V": bias}
    # A head without a bias has none, whatever the student's has.
    bare = {"teacher_weight_V_H": weight, "teacher_bias_V": torch.zeros(V)}
    for options, told in (
        (shared, shared | own),
        (shared | {"teacher_weight_V_H": weight}, shared | bare),
    ):
        found = fused_policy_distillation(hidden, weight, bias, **options, mode=mode)
        expected = fused_policy_distillation(hidden, weight, bias, **told, mode=mode)
        torch.testing.assert_close(found.divergence_N, expected.divergence_N)
        assert float(found.divergence_N.detach().min()) > 0
        torch.testing.assert_close(
            gradients(found, [hidden, weight, bias]), gradients(expected, [hidden, weight, bias])
        )


@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_a_teacher_and_the_weights_of_its_divergence_get_no_gradient(mode):
    leaves, inputs = make_case()
    theirs = {name: it.requires_grad_() for name, it in inputs.items() if it.is_floating_point()}
    assert len(theirs) == 4
    fused_policy_distillation(*leaves, **inputs, mode=mode).loss.backward()
    assert all(it.grad is None for it in theirs.values())
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_16_bit_models_have_32_bit_losses_and_16_bit_gradients(mode):
    leaves, inputs = make_case(torch.bfloat16)
    inputs["divergence_weights_N"] = inputs["divergence_weights_N"].float()
    policy = {"policy_loss": lambda logps, _: -logps.sum() / N}
    found = fused_policy_distillation(*leaves, **inputs, **policy, chunk=8, mode=mode)
    assert {output.dtype for output in found} == {torch.float32}
    # The states, the head and its bias as they are, in 64 bits.
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = plain_policy_distillation(*exact_leaves, **exact_inputs, **policy)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(gradients(found, leaves), gradients(exact, exact_leaves), strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-2


def test_without_a_chunk_of_ones_own_it_is_the_devices():
    leaves, inputs = make_case(n_tokens=600)
    seen = []

    def policy(logps, rows):
        seen.append((rows.start, rows.stop, len(logps)))
        return logps.sum()

    fused_policy_distillation(*leaves, **inputs, policy_loss=policy)
    assert seen == [(0, 256, 256), (256, 512, 256), (512, 600, 88)]
    seen.clear()
    fused_policy_distillation(*leaves, **inputs, policy_loss=policy, chunk=599)
    assert seen == [(0, 599, 599), (599, 600, 1)]
    seen.clear()
    fused_policy_distillation(*leaves, **inputs, policy_loss=policy, mode="recompute", chunk=1)
    assert seen == [(0, 600, 600)]


def assert_refused(changed, message):
    """By the whole loss, and by the outputs alone where they know the argument."""
    leaves, inputs = make_case(torch.float32)
    with pytest.raises((ShapeError, TrainerConfigError)) as caught:
        fused_policy_distillation(*leaves, **inputs | changed)
    assert str(caught.value) == message
    if not changed.keys() & {"divergence_weights_N", "mode"}:
        inputs.pop("divergence_weights_N")
        with pytest.raises(type(caught.value), match=re.escape(message)):
            head_outputs(*leaves, **inputs | changed)


WIDE = "hidden states must be [tokens, hidden] and the head [vocabulary, hidden], not "


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"target_ids_N": torch.zeros(3, dtype=torch.long)},
            "student: 37 hidden states for target ids of shape (3,)",
        ),
        (
            {"teacher_hidden_N_H": torch.zeros(36, H)},
            "teacher: 36 hidden states for target ids of shape (37,)",
        ),
        (
            {"teacher_weight_V_H": torch.zeros(99, H)},
            "the vocabularies differ: student 101, teacher 99; distillation needs one tokenizer",
        ),
        (
            {"teacher_weight_V_H": torch.zeros(V, 3)},
            "teacher: hidden states have width 16, the head 3",
        ),
        ({"teacher_hidden_N_H": torch.zeros(N)}, f"teacher: {WIDE}(37,) and (101, 16)"),
        (
            {"teacher_weight_V_H": torch.zeros(1, V, H)},
            f"teacher: {WIDE}(37, 16) and (1, 101, 16)",
        ),
        (
            {"divergence_weights_N": torch.zeros(3)},
            "divergence_weights_N has shape (3,), expected (37,)",
        ),
    ],
)
def test_inputs_that_do_not_line_up_are_named(changed, message):
    assert_refused(changed, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, "beta=1.5: must lie in [0, 1]"),
        ({"beta": -0.1}, "beta=-0.1: must lie in [0, 1]"),
        ({"temperature": 0.0}, "temperature=0.0: must be greater than 0"),
        ({"softcap": 0.0}, "softcap=0.0: must be greater than 0, or None"),
        ({"softcap": -1.0}, "softcap=-1.0: must be greater than 0, or None"),
        ({"chunk": 0}, "chunk=0: must be at least 1 token"),
        ({"mode": "fast"}, "mode='fast': use 'fused' or 'recompute'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, message):
    assert_refused(options, message)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"softcap": 0.5}, {"chunk": 1}], ids=str)
@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_options_just_inside_their_range_are_those_of_full_logits(options, mode):
    leaves, inputs = make_case()
    chunk = {"chunk": options.pop("chunk", 5)}
    found = fused_policy_distillation(*leaves, **inputs, **options, **chunk, mode=mode)
    expected = plain_policy_distillation(*leaves, **inputs, **options)
    torch.testing.assert_close(tuple(found), tuple(expected))
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))
