import asyncio
from types import SimpleNamespace

from replay_pipeline.replay.ask.attempts import Slots
from replay_pipeline.replay.ask.outcomes import checked as flagged
from replay_pipeline.replay.dialects.replies import Answer
from replay_pipeline.replay.dialects.sizes import Size
from replay_pipeline.replay.dialects.usage import Usage
from replay_pipeline.types import TeacherSpec


def test_slots_are_given_in_order_and_never_too_many():
    async def run():
        slots, order, most = Slots(2), [], 0

        async def work(name):
            nonlocal most
            async with slots.taken():
                most = max(most, slots.n_in_use)
                order.append(name)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for name in range(20):
                group.create_task(work(name))
        return order, most, slots.n_in_use

    assert asyncio.run(run()) == (list(range(20)), 2, 0)


def test_room_shrinks_once_per_cooldown_and_grows_back_slowly():
    slots = Slots(100)
    for _ in range(30):
        slots.slow_down(None)
    assert slots.limit == 70
    for _ in range(50):
        slots.succeeded()
    assert 70.6 < slots.limit < 70.8
    for _ in range(10_000):
        slots.succeeded()
    assert slots.limit == 100
    first = Slots(100, n_first=2)
    first.succeeded()
    assert first.limit == 2, "until it is opened"


def test_after_a_pause_the_waiting_go_on_by_themselves():
    async def run():
        slots = Slots(1)
        slots.slow_down(0.02)
        start = asyncio.get_running_loop().time()
        async with slots.taken():
            return asyncio.get_running_loop().time() - start

    assert asyncio.run(run()) >= 0.02


def test_a_prompt_that_a_local_server_cut_short_is_flagged():
    def checked(n_tokens, n_tool_bytes=0, **teacher):
        spec = TeacherSpec(name="t", model="m", base_url="http://127.0.0.1:11434/v1", **teacher)
        size = Size(100_000, n_tool_bytes=n_tool_bytes)
        task = SimpleNamespace(teacher=spec, question=SimpleNamespace(size=size))
        answer = Answer(
            action={"role": "assistant", "content": "x"}, model="m", provider=None,
            finish_reason="stop", generation_id=None, usage=Usage(n_prompt_tokens=n_tokens),
        )  # fmt: skip
        return flagged(task, answer, None)

    assert checked(4096).error_code == "prompt_truncated"
    assert "OLLAMA_CONTEXT_LENGTH" in checked(4096).error_message
    assert "drops the tools" in checked(4096, n_tool_bytes=90_000).error_message
    assert checked(25_000).error_code is None
    assert checked(4096, dialect="openrouter").error_code is None
