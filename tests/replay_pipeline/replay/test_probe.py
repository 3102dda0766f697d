from replay_pipeline.replay import probe_estimate, probe_teachers
from replay_pipeline.stages.doctor import examine_probes
from tests.support.teachers import TeacherServer


def test_a_probe_shows_what_three_questions_tell_and_books_what_they_cost(tmp_path):
    with TeacherServer(script={"content": "ok"}) as server:
        teachers = server.teachers()
        expected = probe_estimate(teachers)
        seen = probe_teachers(teachers, ledger=tmp_path / "ledger.sqlite")
        bill = server.bill()
    assert bill.n_charged == 3 * len(teachers)
    assert bill.total_nano / 1e9 < expected.bound_usd
    assert expected.expected_usd < 0.01
    assert round(sum(each.cost_usd for each in seen) * 1e9) == bill.total_nano
    by_name = {each.teacher: each for each in seen}
    for each in seen:
        assert (each.has_tools, each.has_usage, each.is_price_right) == (True, True, True)
        assert each.problem is None
    assert by_name["deepseek"].is_cached is True
    assert by_name["qwen"].is_cached is False
    assert all(finding["ok"] for finding in examine_probes(seen))


def test_a_probe_tells_a_price_that_is_not_the_listed_one_and_a_teacher_that_fails(tmp_path):
    faults = [
        {"kind": "overcharge", "factor": 1.5, "model": "deepseek/deepseek-v4-pro"},
        {"kind": "no_usage", "model": "qwen/qwen3-coder"},
        {"kind": "status", "status": 403, "model": "z-ai/glm-4.6"},
    ]
    with TeacherServer(script={"content": "ok"}, faults=faults) as server:
        dear, silent, shut = probe_teachers(server.teachers(), ledger=tmp_path / "ledger.sqlite")
    assert dear.is_price_right is False
    assert silent.has_usage is False
    assert "may not use this model" in shut.problem
    assert [finding["ok"] for finding in examine_probes([dear, silent, shut])] == [False] * 3
