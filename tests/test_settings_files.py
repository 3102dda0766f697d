from replay_pipeline.settings import DEFAULT_TEACHERS, Settings
from replay_pipeline.types import TeacherSpec
from tests.support.settings_files import write_settings


def test_settings_that_are_written_are_read_as_they_were_meant(tmp_path):
    sources = [tmp_path / 'it\'s "odd"', tmp_path / "naïve \\ 日本"]
    own = TeacherSpec(
        name="own",
        model="m",
        api_key_env=None,
        params={"temperature": 0.5, "stop": ["a", "b"]},
        price={"prompt": 1e-6, "completion": 2e-6},
    )
    path = write_settings(
        tmp_path / "data" / "root",
        ingest={"sources": sources, "is_redacted": False},
        replay={"max_total_usd": 0.25, "teachers": [*DEFAULT_TEACHERS, own]},
        pairs={},
    )
    settings = Settings.load(data_dir=tmp_path / "data" / "root", env={})
    assert path == tmp_path / "data" / "root" / "settings.toml"
    assert settings.ingest.sources == tuple(sources)
    assert not settings.ingest.is_redacted
    assert settings.replay.max_total_usd == 0.25
    assert settings.replay.teachers == (
        *DEFAULT_TEACHERS,
        own.model_copy(update={"api_key_env": ""}),
    )
