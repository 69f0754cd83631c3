from pathlib import Path

import pytest

from freedraft.config import ConfigError, PluginOptions, read_yaml
from sssd_plugin.options import SssdOptions


def refusal(options: type[PluginOptions], flags: dict, environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        options.read(flags, environ)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_flags_win_over_file_over_environment(tmp_path: Path) -> None:
    """Values of the environment are converted, and those of others with the prefix are no mistake."""
    file = tmp_path / "options.yaml"
    file.write_text("knee: 20\nlive_max_age: 0.25\nlive: off\n")
    environ = {"FREEDRAFT_CONFIG": str(file), "FREEDRAFT_KNEE": "3", "FREEDRAFT_SCORING": "paper", "HOME": "x"}
    options = SssdOptions.read({"live_max_age": 0.5}, environ)
    assert (options.knee, options.live_max_age, options.scoring, options.live) == (20, 0.5, "paper", "off")
    options = SssdOptions.read({}, {"FREEDRAFT_KNEE": "7", "FREEDRAFT_DATASTORE": "~/store", "FREEDRAFT_WEIGHTS": ""})
    assert (options.knee, options.datastore, options.weights) == (7, Path.home() / "store", None)
    assert SssdOptions.read({}, {"FREEDRAFT_TEST_MODEL": "m", "FREEDRAFT_CACHE": "c"}) == SssdOptions()


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"datastroe": "x"}, {}, ["datastroe", "did you mean 'datastore'"]),
        ({"zzz": 1}, {}, ["zzz", "choose from", "datastore"]),
        ({"knee": 0}, {}, ["'knee'", "greater than or equal to 1", "0"]),
        ({"knee": 2.5}, {}, ["'knee'", "2.5"]),
        ({"scoring": "best"}, {}, ["'scoring'", "'learned' or 'paper'", "best"]),
        ({"live_max_age": float("nan")}, {}, ["'live_max_age'", "finite"]),
        ({"live_max_age": -1.5}, {}, ["'live_max_age'", "-1.5"]),
        ({"weights": "/no/such/file"}, {}, ["'weights'", "/no/such/file", "bench/scorer"]),
        ({"metrics_port": 70000}, {}, ["'metrics_port'", "70000"]),
        ({}, {"FREEDRAFT_KNEE": "six"}, ["FREEDRAFT_KNEE", "six"]),
        ({}, {"FREEDRAFT_DATASTROE": "six"}, ["FREEDRAFT_DATASTROE", "FREEDRAFT_DATASTORE"]),
        ({}, {"FREEDRAFT_CONFIG": "/no/such.yaml"}, ["/no/such.yaml", "YAML"]),
    ],
)
def test_what_is_wrong_is_one_line_with_name_and_remedy(flags: dict, environ: dict, words: list[str]) -> None:
    message = refusal(SssdOptions, flags, environ)
    assert all(word in message for word in words)


def test_a_wrong_file_is_named_and_an_empty_one_is_no_options(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    for content in ("- a\n- b\n", "knee: [", "\x00", "nee: 3\n", "knee: six\n"):
        file.write_text(content)
        assert str(file) in refusal(SssdOptions, {}, {"FREEDRAFT_CONFIG": str(file)})
    file.write_text("")
    assert read_yaml(file) == {}
