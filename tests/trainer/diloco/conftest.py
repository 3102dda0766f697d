"""A real server of S3 for the tests of this room."""

import pytest

from tests.trainer.diloco.s3_server import MotoServer


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    server = MotoServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()
