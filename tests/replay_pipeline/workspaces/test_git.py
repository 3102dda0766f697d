"""The reader of repositories is held to what `git` itself says."""

from contextlib import closing

import pytest

from replay_pipeline.errors import IngestError
from replay_pipeline.workspaces.git import Repository, find_repositories
from tests.support.worked import Worked

FILES = {"a.txt": "one\n", "b/c.txt": "two\n", "b/d/é.txt": "three\n"}


@pytest.fixture
def work(tmp_path):
    work = Worked(tmp_path / "repository")
    work.begin(FILES)
    return work


def test_trees_and_blobs_are_those_of_git(work):
    (work.root / "b" / "link").symlink_to("c.txt")
    work.session.wait(5)
    work.commit("Link")
    head = work.git("rev-parse", "HEAD").strip()
    listed = work.git("ls-tree", "-rz", "HEAD").split("\0")[:-1]
    with closing(Repository(work.root)) as repository:
        files = repository.files(repository.commits[head].tree)
        told = {line.split("\t")[1]: line.split()[2] for line in listed if line[:3] == "100"}
        assert files == told
        assert {name: repository.blob(blob) for name, blob in files.items()} == {
            name: text.encode() for name, text in FILES.items()
        }
        assert repository.blob_id(repository.commits[head].tree, "b/nothing.txt") is None
        assert repository.blob("0" * 40) is None


def test_commits_stand_in_the_order_of_time_and_branches_that_were_merged_keep_their_names(work):
    work.git("checkout", "-q", "-b", "tide")
    work.session.wait(10)
    work.commit("On the branch")
    tip = work.git("rev-parse", "HEAD").strip()
    work.git("checkout", "-q", "main")
    work.session.wait(10)
    work.git("merge", "-q", "--no-ff", "-m", "Merge pull request #7 from mira/tide", "tide")
    work.git("branch", "-D", "tide")
    with closing(Repository(work.root)) as repository:
        assert repository.tips["tide"] == tip
        newest = repository.before(2e9, branch="tide", n=5)
        assert [commit.subject for commit in newest] == ["On the branch", "Begin"]
        assert repository.before(newest[0].committed - 1, branch="tide", n=5) == newest[1:]


def test_a_repository_s_own_settings_start_no_program(work, tmp_path):
    mark = tmp_path / "ran"
    work.git("config", "core.fsmonitor", f"touch {mark}")
    work.git("config", "gpg.program", f"touch {mark}")
    work.git("config", "log.showSignature", "true")
    with closing(Repository(work.root)) as repository:
        assert repository.commits
        assert repository.tips["main"]
    assert not mark.exists()


def test_what_is_no_repository_is_told(tmp_path):
    with pytest.raises(IngestError, match="not a git repository"):
        Repository(tmp_path)
    assert find_repositories([str(tmp_path), "/nowhere"]) == []


def test_worktrees_of_one_repository_are_one(work, tmp_path):
    work.git("worktree", "add", "-q", str(tmp_path / "other"))
    found = find_repositories([str(work.root / "b"), str(tmp_path / "other")])
    assert found == [work.root / ".git"]
