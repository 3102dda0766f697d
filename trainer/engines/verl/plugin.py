"""The plug-in for VeRL. `import verl` loads it through the entry-point group `verl.plugins`.

It has no effect in processes outside our runs. VeRL hides errors of a plug-in, so a failure is also
logged, and the agent loop refuses to start.
"""

import logging
import os
from typing import Any

from trainer.engines.verl.options import VARIABLE

logger = logging.getLogger(__name__)

BACKENDS = ("fsdp", "fsdp2")


def register() -> None:
    """Register our engine before VeRL's own, on every platform that this process knows."""
    from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: PLC0415 - not yet
    from verl.workers.engine.base import EngineRegistry  # noqa: PLC0415 - loaded by `import verl`

    from trainer.engines.verl.engine import ComposerEngine  # noqa: PLC0415 - loads transformers

    places = set()
    for name in PlatformRegistry.registered_names():
        kind: Any = PlatformRegistry.get(name)
        platform = kind()
        places.add((platform.device_name, platform.vendor_name))
    registered = EngineRegistry._engines.get("language_model", {})
    for device, vendor in sorted(places):
        for backend in BACKENDS:
            # VeRL asks for (device, vendor) before it falls back to the device alone.
            if registered.get(backend, {}).get((device, vendor)) is None:
                EngineRegistry.register("language_model", backend, device, vendor)(ComposerEngine)


if VARIABLE in os.environ:
    try:
        register()
    except Exception:
        logger.exception("the three-channel plug-in for VeRL could not be registered")
        raise
