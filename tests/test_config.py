"""Settings: precedence, places, and one clear sentence for everything wrong."""

from __future__ import annotations

import os

import pytest

from attnbench import config
from attnbench.config import Settings, load_settings
from attnbench.errors import BrokenFile, UsageError


@pytest.fixture
def project(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    return tmp_path


@pytest.fixture
def told(caplog):
    """What was warned of, once more although it was told before."""
    config._warn_once.cache_clear()
    return caplog


def load(cwd, overrides=None, **environ) -> Settings:
    return load_settings(overrides, {f"ATTNBENCH_{name}": value for name, value in environ.items()}, cwd)


def test_defaults(project):
    assert load(project) == Settings()
    assert Settings().runs_dir == "runs"


def test_command_line_over_environment_over_file_over_default(project):
    (project / "attnbench.toml").write_text("threads = 1\nbudget_s = 9\nseed = 5\n")
    found = load(project, {"threads": 3, "seed": None}, THREADS="2", BUDGET_S="0.5")
    assert (found.threads, found.budget_s, found.seed, found.timeout_s) == (3, 0.5, 5, Settings().timeout_s)


def test_nearest_file_wins_and_pyproject_needs_the_table(project):
    (project / "attnbench.toml").write_text("threads = 1\n")
    (project / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert load(project / "a" / "b").threads == 1
    (project / "a" / "pyproject.toml").write_text("[tool.attnbench]\nthreads = 2\n")
    assert load(project / "a" / "b").threads == 2
    (project / "a" / "attnbench.toml").write_text("threads = 3\n")
    assert load(project / "a" / "b").threads == 3


@pytest.mark.parametrize("place", ["repository", "home", "neither"])
def test_files_above_the_repository_or_the_home_folder_are_not_read(tmp_path, monkeypatch, told, place):
    inner = tmp_path / "mine" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.setattr(config.Path, "home", lambda: tmp_path / ("mine" if place == "home" else "elsewhere"))
    if place == "repository":
        (tmp_path / "mine/.git").write_text("gitdir: elsewhere\n")
    (tmp_path / "attnbench.toml").write_text('threads = 1\nbuild = "touch pwned"\n')
    assert load(inner) == Settings()
    (tmp_path / "mine/attnbench.toml").write_text('threads = 2\nbuild = "make"\n')
    assert load(inner).threads == (None if place == "neither" else 2)
    assert load(inner).build == ("make" if place == "repository" else None)
    assert ("is not in a git repository" in told.text) == (place == "home")


def test_a_file_of_another_user_is_not_read(project, monkeypatch, told):
    (project / "attnbench.toml").write_text('build = "touch pwned"\n')
    real, strangers = config.Path.stat, {project / "attnbench.toml": 4321}

    class Owned:
        def __init__(self, path, **given):
            self._found, self._path = real(path, **given), path

        def __getattr__(self, name):
            known = getattr(self._found, name)
            return strangers.get(self._path, known) if name == "st_uid" else known

    monkeypatch.setattr(config.Path, "stat", lambda path, **given: Owned(path, **given))
    assert load(project / "a") == Settings()
    assert "belongs to another user (uid 4321)" in told.text
    strangers[project / ".git"] = 4321  # a repository of another user, which git refuses unless it is allowed
    assert load(project / "a").build == "touch pwned"


def test_runs_folder_is_relative_to_the_file(project):
    (project / "attnbench.toml").write_text('runs_dir = "out"\n')
    assert load(project / "a" / "b").runs_dir == str(project / "out")
    assert load(project, RUNS_DIR="here").runs_dir == "here"


def test_unknown_names_come_with_the_nearest(project):
    with pytest.raises(UsageError, match="Near: threads"):
        load(project, {"thread": 3})
    with pytest.raises(UsageError, match=r'"ATTNBENCH_TREADS"\. Near: ATTNBENCH_THREADS'):
        load(project, TREADS="3")
    assert load(project, SOMETHING_ELSE="3") == Settings()
    with pytest.raises(UsageError, match="Known: runs_dir"):
        load(project, {"zzz": 3})


WRONG_FILES = [
    ("attnbench.toml", "threads = = 1\n", 1, "not valid TOML"),
    ("attnbench.toml", "seed = 1\nthread = 1\n", 2, "Near: threads"),
    ("attnbench.toml", 'seed = 1\nthreads = "many"\n', 2, "Expected `int | null`, got `str`"),
    ("attnbench.toml", "threads = 0\n", 1, "threads must be more than 0"),
    (
        "pyproject.toml",
        "[project]\nthreads = 1\n\n[tool.attnbench]\nbudget = 3\nthreads = 1\n",
        5,
        "Near: budget_s",
    ),
    ("pyproject.toml", "[project]\nthreads = 1\n[tool.attnbench]\nthreads = 1.5\n", 4, "threads"),
]


@pytest.mark.parametrize("name,text,line,words", WRONG_FILES, ids=[w for *_, w in WRONG_FILES])
def test_wrong_file_names_the_line(project, name, text, line, words):
    (project / name).write_text(text)
    with pytest.raises(BrokenFile) as caught:
        load(project)
    assert str(caught.value).startswith(f"{project / name}, line {line}: ")
    assert words in str(caught.value)


def test_wrong_values_elsewhere_say_where(project):
    with pytest.raises(UsageError, match="in the environment is wrong"):
        load(project, THREADS="many")
    with pytest.raises(UsageError, match="in the command line is wrong"):
        load(project, {"timeout_s": -1.0})


def test_the_package_under_test(project):
    (project / "pyproject.toml").write_text(
        "[tool.attnbench]\n"
        'implementations = ["torch.sdpa", "mine.kernels:attention"]\n'
        'build = "make"\npythonpath = ["src", "build/lib"]\nthresholds = "ci/floors.toml"\n'
    )
    found = load(project / "a")
    assert found.implementations == ("torch.sdpa", "mine.kernels:attention")
    assert (found.build, found.pythonpath) == ("make", ("src", "build/lib"))
    assert (found.thresholds, found.baselines_dir) == (str(project / "ci/floors.toml"), "baselines")


def test_lists_in_variables_are_split(project):
    found = load(project, IMPLEMENTATIONS="torch.sdpa jax.xla", PYTHONPATH=os.pathsep.join(["src", "my lib"]))
    assert found.implementations == ("torch.sdpa", "jax.xla")
    assert found.pythonpath == ("src", "my lib")


def test_a_word_where_a_list_belongs(project):
    (project / "attnbench.toml").write_text('seed = 1\nimplementations = "torch.sdpa"\n')
    with pytest.raises(BrokenFile, match=r"line 2: .*Expected `array`, got `str`"):
        load(project)
