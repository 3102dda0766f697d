"""Serve a local causal LM by the OpenAI protocol, with the same rendering as in training.

    python -m trainer serve --model FOLDER

The command prints one JSON line (`base_url`, `model`), and serves until you stop it.
`/v1/completions` returns log-probabilities of prompt tokens in vLLM's form (`prompt_logprobs`), so
the model can be a teacher of `trl.replay: distill`. Parts that the model's chat template can't show
are written as text, and calls are parsed from text, so you can sample a small model like any
endpoint. The server listens only on this machine.
"""

import argparse
import json
import logging
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.data.acting import end_tokens
from trainer.data.rendering import RENDERING_FILE, Renderer
from trainer.data.rewards import parse_action
from trainer.errors import DatasetError, TrainerConfigError
from trainer.model.scoring import CHUNK, project, response_states

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 256
DEFAULT_PROMPT_TOKENS = 1024
N_PROMPTS = 64
"""Number of rendered prompts in the cache."""


class LocalModel:
    """The model that answers requests of the OpenAI protocol, one at a time."""

    def __init__(self, folder: str | Path, *, max_prompt_tokens: int | None = None) -> None:
        """Load the model.

        Args:
            folder: of a causal LM.
            max_prompt_tokens: by default what it was trained with, or 1,024 if that isn't known.

        Raises:
            TrainerConfigError: there is no causal LM with a tokenizer in the folder.
        """
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
        except (OSError, ValueError) as error:
            raise TrainerConfigError(f"{folder}: no model there ({error})") from error
        self.model: Any = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        how = Path(folder) / RENDERING_FILE
        rendering = json.loads(how.read_text("utf-8")) if how.is_file() else {}
        longest = rendering.pop("max_prompt_tokens", None) or DEFAULT_PROMPT_TOKENS
        self.renderer = Renderer(
            tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens or longest, **rendering
        )
        self._one_at_a_time = threading.Lock()
        self._prompts: dict[str, list[int]] = {}

    @torch.no_grad()
    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat completion of a request.

        Temperature 0 is greedy. Equal seeds give equal answers.

        Raises:
            DatasetError: the chat template refuses the messages.
        """
        renderer, device = self.renderer, self.model.device
        prompt = self._prompt(request["messages"], request.get("tools"))
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        temperature = float(request.get("temperature", 1.0))
        # Nothing else of the model's own generation settings is in the request, so nothing is used.
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
        prompt_1P = torch.tensor([prompt], device=device)
        with self._one_at_a_time:
            if request.get("seed") is not None:
                torch.manual_seed(int(request["seed"]))
            ids_1T = self.model.generate(
                input_ids=prompt_1P,
                attention_mask=torch.ones_like(prompt_1P),
                do_sample=bool(temperature),
                **sampling,
                max_new_tokens=int(limit or DEFAULT_NEW_TOKENS),
                pad_token_id=renderer.tokenizer.pad_token_id,
                eos_token_id=end_tokens(self.model, renderer.tokenizer),
            )
        new = ids_1T[0, len(prompt) :].tolist()
        message = parse_action(renderer.tokenizer.decode(new, skip_special_tokens=True))
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        is_cut = bool(new) and new[-1] not in end_tokens(self.model, renderer.tokenizer)
        reason = "tool_calls" if message.get("tool_calls") else "length" if is_cut else "stop"
        return {
            "object": "chat.completion",
            "created": int(datetime.now(UTC).timestamp()),
            "model": request.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(new),
                "total_tokens": len(prompt) + len(new),
            },
        }

    @torch.no_grad()
    def scored(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return log-probabilities of the tokens of `prompt` (ids, or lists of ids), without sampling.

        Each position has its `prompt_logprobs` most likely tokens and the actual token, in vLLM's
        form: `logprob` and `rank` by id. The first position has none.

        Raises:
            ValueError: there is nothing to score, or the request wants generated text.
        """
        top_k, prompts = int(request.get("prompt_logprobs") or 0), request.get("prompt") or []
        prompts = prompts if prompts and isinstance(prompts[0], list) else [prompts]
        if top_k < 1 or int(request.get("max_tokens", 1)) > 1 or not all(prompts):
            raise ValueError(
                "completions here score a prompt of token ids: set prompt_logprobs, and max_tokens=1"
            )
        n_ids = self.model.get_input_embeddings().num_embeddings
        if outside := [i for ids in prompts for i in ids if not 0 <= i < n_ids]:
            raise ValueError(f"token id {outside[0]} is not one of the model's {n_ids} ids")
        with self._one_at_a_time:
            choices = [
                {
                    "index": index,
                    "text": "",
                    "finish_reason": "length",
                    "prompt_logprobs": [None, *self._scores(ids, top_k)],
                }
                for index, ids in enumerate(prompts)
            ]
        return {"object": "text_completion", "model": request.get("model"), "choices": choices}

    def _scores(self, ids: Sequence[int], top_k: int) -> list[dict[str, Any]]:
        ids_1T = torch.tensor([list(ids)], device=self.model.device)
        states_TH = response_states(self.model, ids_1T, None)[0, :-1]
        scores: list[dict[str, Any]] = []
        for states, written in zip(states_TH.split(CHUNK), ids_1T[0, 1:].split(CHUNK), strict=True):
            logp_NV = project(self.model, states).float().log_softmax(-1)
            top = logp_NV.topk(min(top_k, logp_NV.size(-1)))
            own_N1 = logp_NV.gather(-1, written.unsqueeze(-1))
            ranks = 1 + (logp_NV > own_N1).sum(-1)
            columns = (top.indices, top.values, written, own_N1.squeeze(-1), ranks)
            for likeliest, logps, token_id, logp, rank in zip(
                *(column.tolist() for column in columns), strict=True
            ):
                entries = zip([token_id, *likeliest], [logp, *logps], strict=True)
                ranked = zip(entries, [rank, *range(1, len(likeliest) + 1)], strict=True)
                scores.append(
                    {str(i): {"logprob": value, "rank": place} for (i, value), place in ranked}
                )
        return scores

    def _prompt(self, messages: Any, tools: Any) -> list[int]:
        """Render a prompt; the samples of a state share it, and a long one takes its time."""
        key = json.dumps([messages, tools])
        if key not in self._prompts:
            if len(self._prompts) >= N_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = self.renderer.prompt_ids(messages, tools)
        return self._prompts[key]


def as_stream(answer: Mapping[str, Any]) -> str:
    """Return a chat completion as server-sent events: the whole message, the finish reason, and the usage."""
    [choice] = answer["choices"]
    calls = [
        {"index": i} | call for i, call in enumerate(choice["message"].get("tool_calls") or ())
    ]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    common = {**answer, "object": "chat.completion.chunk", "usage": None}
    ends: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    events = (
        common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        common | {"choices": [ends]},
        common | {"choices": [], "usage": answer["usage"]},
    )
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


class ModelServer(ThreadingHTTPServer):
    """The server of one model on this machine."""

    daemon_threads = True
    request_queue_size = (
        128  # of the five that are the default, a client with more requests sees resets
    )

    def __init__(self, model: LocalModel, name: str, *, port: int = 0) -> None:
        """Listen on `port`, or on any free one."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.model, self.name = model, name

    @property
    def base_url(self) -> str:
        """Return the address without `/chat/completions`."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer  # pyrefly: ignore[bad-override-mutable-attribute]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = [{"id": self.server.name, "object": "model"}]
        self._reply(200, {"object": "list", "data": known})

    def do_POST(self) -> None:
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))
            is_chat = self.path.endswith("/chat/completions")
            model = self.server.model
            answer = model.answer(request) if is_chat else model.scored(request)
        except (ValueError, KeyError, TypeError, AttributeError, DatasetError) as error:
            self._reply(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
        else:
            answer |= {"id": f"local-{uuid.uuid4()}"}
            if is_chat and request.get("stream"):
                self._send(200, "text/event-stream", as_stream(answer).encode())
            else:
                self._reply(200, answer)

    def _reply(self, status: int, body: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def serve_command(arguments: Sequence[str]) -> int:
    """Run `python -m trainer serve`."""
    parser = argparse.ArgumentParser(prog="python -m trainer serve", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a causal LM, e.g. out/checkpoint")
    parser.add_argument(
        "--name", help="the model's name in requests; by default, the folder's name"
    )
    parser.add_argument("--port", type=int, default=0, help="any free port by default")
    help_ = "by default those of the model's training, or 1024"
    parser.add_argument("--max-prompt-tokens", type=int, help=help_)
    options = parser.parse_args(arguments)
    try:
        model = LocalModel(options.model, max_prompt_tokens=options.max_prompt_tokens)
    except TrainerConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    name = options.name or Path(options.model).name
    with ModelServer(model, name, port=options.port) as server:
        sys.stdout.write(json.dumps({"base_url": server.base_url, "model": name}) + "\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0
