"""Serve a local causal LM by the OpenAI protocol, with the same rendering as in training.

    python recipes/what_a_dollar_buys/serve.py --model FOLDER

It prints one JSON line (`base_url`, `model`), and serves on this machine until it is stopped. Parts
that the model's chat template can't show are written as text, and calls are parsed from text.
Requests that wait at the same time are answered in one batch. `transformers serve` 5.23 gives a
prompt whole and not as the training cut it, and leaves out what a template can't show.
"""

import argparse
import inspect
import json
import logging
import math
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trainer.data.acting import BATCH_ROWS, BATCH_TOKENS, end_tokens
from trainer.data.rendering import RENDERING_FILE, Renderer
from trainer.data.rewards import parse_action
from trainer.errors import DatasetError, TrainerConfigError

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 256
DEFAULT_PROMPT_TOKENS = 1024
N_PROMPTS = 64
"""Number of rendered prompts in the cache."""
_GATHER_S = 0.005
"""What a batch waits for requests that arrive with its first one."""


@dataclass(kw_only=True, eq=False)
class _Asked:
    """A request that waits for its batch."""

    prompt: list[int]
    limit: int
    temperature: float
    generator: torch.Generator = field(default_factory=torch.Generator)
    answer: Future[list[int]] = field(default_factory=Future)


class _Sampling(LogitsProcessor):
    """Make the likeliest token of each row a sample, by the temperature and the seed of its request.

    The largest of `logits / temperature + noise` with noise of a standard Gumbel distribution has the
    distribution of the softmax (the Gumbel-max trick, Maddison et al. 2014, arXiv:1411.0030). So rows
    of other temperatures and seeds, and greedy ones, share a batch.
    """

    def __init__(self, batch: Sequence[_Asked]) -> None:
        self._batch = batch

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        del input_ids
        scores_BV = scores.float()
        for row, asked in enumerate(self._batch):
            if asked.temperature:
                noise_V = torch.empty(scores_BV.size(1)).exponential_(generator=asked.generator)
                noise_V = -noise_V.log().to(scores_BV.device)
                scores_BV[row] = scores_BV[row] / asked.temperature + noise_V
        return scores_BV


class _Limits(StoppingCriteria):
    """Stop each row at the limit of its request."""

    def __init__(self, batch: Sequence[_Asked], ids_BP: torch.Tensor) -> None:
        limits_B = torch.tensor([asked.limit for asked in batch], device=ids_BP.device)
        self._longest_B = ids_BP.size(1) + limits_B

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        del scores, kwargs
        return input_ids.size(1) >= self._longest_B


class LocalModel:
    """The model that answers requests of the OpenAI protocol."""

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
        self._tokenizer = tokenizer
        self._ends = end_tokens(self.model, tokenizer)
        # Only what a request says counts, so a penalty of the model's own settings must not.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self._ends, pad_token_id=tokenizer.pad_token_id
        )
        # A model that takes no positions can't read prompts ahead that are padded on the left.
        taken = inspect.signature(self.model.forward).parameters
        names = ("cache", "past_key_values")  # of transformers 5.24, and of those before
        self._cache = next((name for name in names if name in taken), "")
        self._reads_ahead = {"position_ids", self._cache, "logits_to_keep"} <= taken.keys()
        self._one_at_a_time = threading.Lock()
        self._prompts: dict[str, list[int]] = {}
        self._waiting: deque[_Asked] = deque()
        self._batches = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat completion of a request.

        Temperature 0 is greedy. Equal seeds give equal answers, but for two tokens that are nearly
        equally likely: sums of a larger batch are rounded in another order.

        Raises:
            DatasetError: the chat template refuses the messages.
            ValueError: the limit or the temperature is not a possible one.
        """
        renderer = self.renderer
        prompt = self._prompt(request["messages"], request.get("tools"))
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        asked = _Asked(
            prompt=prompt,
            limit=int(limit or DEFAULT_NEW_TOKENS),
            temperature=float(request.get("temperature", 1.0)),
        )
        if asked.limit < 1 or not 0 <= asked.temperature < math.inf:
            raise ValueError("max_completion_tokens must be at least 1, and temperature at least 0")
        if request.get("seed") is not None:
            asked.generator.manual_seed(int(request["seed"]) % 2**63)
        else:
            asked.generator.seed()
        new = self._generated(asked)
        message = parse_action(renderer.tokenizer.decode(new, skip_special_tokens=True))
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        is_cut = bool(new) and new[-1] not in self._ends
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

    def _generated(self, asked: _Asked) -> list[int]:
        """Answer with what else is waiting."""
        self._waiting.append(asked)
        self._batches.submit(self._answer_waiting)
        return asked.answer.result()

    @torch.no_grad()
    def _answer_waiting(self) -> None:
        if not self._waiting:
            return  # an earlier batch had room for this request
        time.sleep(_GATHER_S)
        batch = [self._waiting.popleft()]
        while self._waiting and len(batch) < BATCH_ROWS:
            longest = max(len(asked.prompt) for asked in (*batch, self._waiting[0]))
            if longest * (len(batch) + 1) > BATCH_TOKENS:
                break
            batch.append(self._waiting.popleft())
        try:
            with self._one_at_a_time:
                rows = self._continuations(batch)
        except Exception as error:  # noqa: BLE001 - each request that waits gets it
            for asked in batch:
                asked.answer.set_exception(error)
            return
        for asked, row in zip(batch, rows, strict=True):
            end = next((i for i, token in enumerate(row) if token in self._ends), len(row))
            asked.answer.set_result(row[: min(end + 1, asked.limit)])

    def _continuations(self, batch: Sequence[_Asked]) -> list[list[int]]:
        """Generate for each request, and read a prompt once that several of them have."""
        prompts = list(dict.fromkeys(tuple(asked.prompt) for asked in batch))
        rows_B = torch.tensor([prompts.index(tuple(asked.prompt)) for asked in batch])
        padded = self._tokenizer.pad({"input_ids": [list(p) for p in prompts]}, return_tensors="pt")
        ids_BP, mask_BP = (
            padded[name].to(self.model.device) for name in ("input_ids", "attention_mask")
        )
        ahead = {}
        if len(prompts) < len(batch) and ids_BP.size(1) > 1 and self._reads_ahead:
            positions_BP = (mask_BP.cumsum(-1) - 1).clamp(min=0)
            read = self.model(
                input_ids=ids_BP[:, :-1],
                attention_mask=mask_BP[:, :-1],
                position_ids=positions_BP[:, :-1],
                use_cache=True,
                logits_to_keep=1,
            )
            ahead = {self._cache: read[self._cache]}
            ahead[self._cache].reorder_cache(rows_B.to(ids_BP.device))
        generated_BT = self.model.generate(
            input_ids=ids_BP[rows_B],
            attention_mask=mask_BP[rows_B],
            do_sample=False,
            max_new_tokens=max(asked.limit for asked in batch),
            logits_processor=LogitsProcessorList([_Sampling(batch)]),
            stopping_criteria=StoppingCriteriaList([_Limits(batch, ids_BP)]),
            **ahead,
        )
        return generated_BT[:, ids_BP.size(1) :].tolist()

    def _prompt(self, messages: Any, tools: Any) -> list[int]:
        """Render a prompt; the samples of a state share it, and a long one takes its time."""
        key = json.dumps([messages, tools])
        if key not in self._prompts:
            if len(self._prompts) >= N_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = self.renderer.prompt_ids(messages, tools)
        return self._prompts[key]


def _as_stream(answer: Mapping[str, Any]) -> str:
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
            answer = self.server.model.answer(request)
        except (ValueError, KeyError, TypeError, AttributeError, DatasetError) as error:
            self._reply(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
        except RuntimeError as error:  # of torch, e.g. not enough memory
            logger.error("a request failed: %s", error)
            self._reply(500, {"error": {"message": f"{type(error).__name__}: {error}"}})
        else:
            answer |= {"id": f"local-{uuid.uuid4()}"}
            if request.get("stream"):
                self._send(200, "text/event-stream", _as_stream(answer).encode())
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
    """Serve the model that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
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


if __name__ == "__main__":
    sys.exit(serve_command(sys.argv[1:]))
