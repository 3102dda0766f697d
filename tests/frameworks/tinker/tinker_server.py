"""A loopback server that speaks Tinker's protocol, on a tiny model whose gradients are true.

Messages are those of the package's own protocol buffers and response types. Requests of a training
client are carried out in the order of their numbers, as the service promises.
"""

import json
import threading
from collections.abc import Callable
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor
from transformers import AutoModelForCausalLM

PROTO = "application/x-protobuf"
Answer = dict[str, Any] | bytes


class TinkerServer:
    """Full weights of one model, whatever rank is asked for; one optimizer; snapshots to sample."""

    def __init__(self, base_model: str, *, topk: bool = True) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
        self.base_model, self.topk = base_model, topk
        self.snapshots: dict[str, Any] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.gradients: list[Tensor] = []
        """Of the last optimizer step, before it was made."""
        self.calls: list[str] = []
        self._answers: dict[str, Answer] = {}
        self._waiting: dict[int, tuple[str, Callable[[], Answer]]] = {}
        self._next = 1
        self._n = 0
        self._changed = threading.Condition()

    # -- what the service computes ---------------------------------------------------------------

    @staticmethod
    def logprobs(model: Any, ids: list[int]) -> Tensor:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def forward_backward(self, message: Any) -> bytes:
        self.calls.append("forward" if message.forward_only else message.loss_fn)
        output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        total = torch.zeros(())
        for datum in message.data:
            ids = [
                int(i)
                for chunk in datum.model_input
                for i in np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32)
            ]
            inputs = {name: _tensor(value) for name, value in datum.loss_fn_inputs.items()}
            targets = inputs["target_tokens"]
            assert len(targets) == len(ids)
            with torch.set_grad_enabled(not message.forward_only):
                logps = self.logprobs(self.model, ids)
                picked = logps.gather(-1, targets.reshape(len(ids), -1)).reshape(targets.shape)
                if message.loss_fn == "cross_entropy":
                    assert inputs["weights"].shape == targets.shape
                    total = total - (picked * inputs["weights"]).sum()
                elif message.loss_fn == "importance_sampling":
                    ratio = (picked - inputs["logprobs"]).exp()
                    total = total - (ratio * inputs["advantages"]).sum()
                else:
                    raise ValueError(f"no loss {message.loss_fn}")
            record = output.loss_fn_outputs.add(num_datums=1)
            values = picked.detach().numpy().astype(np.float32)
            record.fields["logprobs"].CopyFrom(
                wire.BatchedTensor(
                    data=values.tobytes(),
                    offsets=np.array([0, values.nbytes], dtype=np.int64).tobytes(),
                    dtype=wire.DTYPE_FLOAT32,
                    trailing_shape=values.shape[1:],
                )
            )
        if not message.forward_only:
            total.backward()
        output.metrics["loss:sum"] = float(total.detach())
        return output.SerializeToString()

    def optim_step(self, body: dict[str, Any]) -> Answer:
        self.calls.append("optim_step")
        adam = body["adam_params"]
        parameters = list(self.model.parameters())
        self.gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters
        ]
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(parameters)
        self.optimizer.param_groups[0].update(
            lr=adam["learning_rate"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
        )
        if adam["grad_clip_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(parameters, adam["grad_clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"type": "optim_step"}

    def save_for_sampler(self, body: dict[str, Any]) -> Answer:
        name = f"snapshot-{len(self.snapshots)}"
        self.snapshots[name] = deepcopy(self.model).eval()
        answer = {"type": "save_weights_for_sampler", "sampling_session_id": name}
        return answer | (
            {"path": f"tinker://run/sampler_weights/{body['path']}"} if body.get("path") else {}
        )

    @torch.no_grad()
    def sample(self, body: dict[str, Any]) -> bytes:
        self.calls.append("sample")
        model, params = self.snapshots[body["sampling_session_id"]], body["sampling_params"]
        prompt = [i for chunk in body["prompt"]["chunks"] for i in chunk["tokens"]]
        generator = torch.Generator().manual_seed(params.get("seed") or 0)
        response = wire.SampleResponse()
        for _ in range(body.get("num_samples", 1)):
            ids, logprobs, reason = list(prompt), [], wire.STOP_REASON_LENGTH
            for _ in range(params["max_tokens"]):
                logits = model(torch.tensor([ids])).logits[0, -1]
                logps = (logits / params.get("temperature", 1.0)).log_softmax(-1)
                ids.append(int(torch.multinomial(logps.exp(), 1, generator=generator)))
                logprobs.append(float(logps[ids[-1]]))
                if ids[-1] in (params.get("stop") or ()):
                    reason = wire.STOP_REASON_STOP
                    break
            response.sequences.add(
                stop_reason=reason,
                tokens=np.array(ids[len(prompt) :], dtype=np.int32).tobytes(),
                logprobs=np.array(logprobs, dtype=np.float32).tobytes(),
            )
        if body.get("prompt_logprobs"):
            logps = self.logprobs(model, prompt)
            own = logps[:-1].gather(-1, torch.tensor(prompt)[1:, None])[:, 0]
            values = torch.cat([torch.tensor([float("nan")]), own])
            response.prompt_logprobs = values.numpy().astype(np.float32).tobytes()
            k = body.get("topk_prompt_logprobs", 0) if self.topk else 0
            if k:
                best = logps[:-1].topk(min(k, logps.size(-1)))
                width = best.indices.size(-1)
                ids = torch.cat([torch.zeros(1, width, dtype=torch.long), best.indices])
                scores = torch.cat([torch.full((1, width), -99999.0), best.values])
                response.topk_prompt_logprobs.CopyFrom(
                    wire.TopkLogprobs(
                        token_ids=ids.numpy().astype(np.int32).tobytes(),
                        logprobs=scores.numpy().astype(np.float32).tobytes(),
                        k=width,
                        length=len(prompt),
                    )
                )
        return response.SerializeToString()

    # -- the protocol ----------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> tuple[int, Answer]:
        """Status and body of a request; what takes time becomes a future."""
        if path == "retrieve_future":
            return self._retrieve(body["request_id"])
        plain: dict[str, dict[str, Any]] = {
            "client/config": {},
            "client/dynamic_config": {},
            "create_session": {"session_id": "session"},
            "session_heartbeat": {},
            "sessions/session/finish": {},
            "telemetry": {"status": "accepted"},
            "get_info": {
                "model_id": "run",
                "model_data": {"model_name": self.base_model, "tokenizer_id": self.base_model},
            },
        }
        if path in plain:
            return 200, plain[path]
        work: dict[str, Callable[[], Answer]] = {
            "create_model": lambda: {"model_id": "run", "type": "create_model"},
            "forward_backward": lambda: self.forward_backward(body),
            "optim_step": lambda: self.optim_step(body),
            "save_weights_for_sampler": lambda: self.save_for_sampler(body),
            "save_weights": lambda: {"path": f"tinker://run/weights/{body['path']}"},
            "asample": lambda: self.sample(body),
        }
        if path not in work:
            return 404, {"error": f"no {path}"}
        number = None
        if path not in ("create_model", "asample"):
            number = body.seq_id if path == "forward_backward" else body.get("seq_id")
        future = self._submit(number, work[path])
        names = (
            [f"{future}-{k}" for k in range(body.get("num_samples", 1))]
            if path == "asample"
            else []
        )
        return 200, {"request_id": future, "model_id": "run", "sample_sequence_ids": names}

    def _submit(self, number: int | None, job: Callable[[], Answer]) -> str:
        with self._changed:
            self._n += 1
            future = f"future-{self._n}"
            if number is None:
                self._answers[future] = _result_of(job)
            else:
                self._waiting[number] = (future, job)
                while self._next in self._waiting:
                    name, ready = self._waiting.pop(self._next)
                    self._answers[name] = _result_of(ready)
                    self._next += 1
            self._changed.notify_all()
            return future

    def _retrieve(self, future: str) -> tuple[int, Answer]:
        with self._changed:
            if not self._changed.wait_for(lambda: future in self._answers, timeout=5):
                return 200, {"type": "try_again", "request_id": future, "queue_state": "active"}
            return 200, self._answers[future]

    def start(self) -> str:
        """Serve in a thread; gives the address."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Type") == PROTO:
                    body: Any = wire.ForwardBackwardRequest()
                    body.ParseFromString(raw)
                else:
                    body = json.loads(raw or b"{}")
                status, answer = owner.answer(self.path.removeprefix("/api/v1/"), body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                kind = PROTO if isinstance(answer, bytes) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._http.server_port}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def _result_of(job: Callable[[], Answer]) -> Answer:
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - the client is told, and fails
        return {"error": f"{type(error).__name__}: {error}", "category": "user"}


def _tensor(message: Any) -> Tensor:
    kind = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64}[message.dtype]
    if message.WhichOneof("encoding") == "dense":
        values = np.frombuffer(message.dense, dtype=kind).copy()
        return torch.from_numpy(values).reshape(list(message.shape))
    csr = message.sparse_csr  # the client's choice where most entries are 0
    rows, columns = (
        torch.from_numpy(np.frombuffer(part, dtype=np.int64).copy())
        for part in (csr.crow_indices, csr.col_indices)
    )
    values = torch.from_numpy(np.frombuffer(csr.values, dtype=kind).copy())
    return torch.sparse_csr_tensor(rows, columns, values, list(message.shape)).to_dense()
