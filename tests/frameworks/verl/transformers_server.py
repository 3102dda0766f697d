"""A rollout server on transformers: samples, scores, and takes the policy's weights."""

import asyncio

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

NAME = "transformers_server_{}"


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.step, self.turn = 0, asyncio.Lock()

    async def ready(self):
        return True

    @torch.no_grad()
    def scored(self, prompt_ids, top_k):
        """Row i is about token i + 1, as in vLLM; the last row is filler."""
        logp = self.model(torch.tensor([prompt_ids])).logits[0].log_softmax(-1)
        values, ids = logp.topk(top_k, dim=-1)
        values[-1], ids[-1] = 0.0, 0
        return {"prompt_ids": ids.tolist(), "prompt_logprobs": values.tolist()}

    @torch.no_grad()
    def sampled(self, prompt_ids, n_tokens, temperature):
        ids = torch.tensor([prompt_ids])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        new = made.sequences[0, ids.size(1) :]
        rows = [(logits[0] / temperature).log_softmax(-1) for logits in made.logits]
        return new.tolist(), [float(row[i]) for row, i in zip(rows, new, strict=True)]

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        params = dict(sampling_params)
        async with self.turn:
            if params.get("prompt_logprobs"):
                extra = self.scored(list(prompt_ids), params["prompt_logprobs"])
                tokens, logps = [], []
            else:
                extra = {}
                n_tokens = params.get("max_tokens") or params.get("max_new_tokens") or 16
                temperature = max(float(params.get("temperature", 1.0)), 1e-4)
                tokens, logps = self.sampled(list(prompt_ids), n_tokens, temperature)
        return TokenOutput(
            token_ids=tokens,
            log_probs=logps,
            stop_reason="completed",
            num_preempted=0,
            extra_fields=extra | {"global_steps": self.step},
        )

    async def load(self, state, step):
        async with self.turn:
            self.model.load_state_dict(state, strict=False)
            self.step = step or self.step

    async def set_global_steps(self, step):
        self.step = step

    async def abort_all_requests(self, *_, **__):
        return {}

    async def nothing(self, *_, **__):
        return None

    wake_up = sleep = resume_generation = clear_kv_cache = release_kv_cache = nothing
    resume_kv_cache = start_profile = stop_profile = nothing


class TransformersReplica(RolloutReplica):
    async def launch_servers(self):
        name = NAME.format(self.replica_rank)
        server = Server.options(name=name, max_concurrency=64).remote(self.model_config.path)
        await server.ready.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"ray://{name}"


class TransformersAdapter(BaseRollout):
    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, wire_format="named_tensors", global_steps=None, **_):
        state = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in weights
        }
        server = ray.get_actor(NAME.format(torch.distributed.get_rank()))
        await server.load.remote(state, global_steps)
