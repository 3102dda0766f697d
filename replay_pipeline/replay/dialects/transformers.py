"""`transformers serve`."""

from replay_pipeline.replay.dialects.base import Dialect


class Transformers(Dialect):
    """It rejects fields that aren't OpenAI's (status 422), and reads only some of OpenAI's.

    Source: `cli/serving/chat_completion.py` of transformers 5.
    """

    name = "transformers"
    has_logprobs = False
    parameters = frozenset(
        {"max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "logit_bias",
         "generation_config", "chat_template_kwargs", "response_format"}
    )  # fmt: skip
