"""Azure OpenAI: OpenAI's protocol with the key in a header of its own."""

from pydantic import SecretStr

from replay_pipeline.replay.dialects.openai import OpenAI


class Azure(OpenAI):
    """The address is `https://NAME.openai.azure.com/openai/v1`, the model a deployment's name.

    Source: Azure OpenAI, v1 API.
    """

    name = "azure"
    hosts = ("openai.azure.com", "services.ai.azure.com")

    def authorization(self, key: SecretStr | None) -> dict[str, str]:
        """Return the key in `api-key`."""
        return {} if key is None else {"api-key": key.get_secret_value()}
