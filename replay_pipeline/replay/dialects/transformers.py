"""`transformers serve`."""

from replay_pipeline.replay.dialects.base import Dialect


class Transformers(Dialect):
    """It answers 422 to a field that is not OpenAI's, and reads these alone of those that are.

    Source: `cli/serving/chat_completion.py` of transformers 5.
    """

    name = "transformers"
    has_logprobs = False
    parameters = frozenset(
        {"max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "logit_bias",
         "generation_config", "chat_template_kwargs", "response_format"}
    )  # fmt: skip
