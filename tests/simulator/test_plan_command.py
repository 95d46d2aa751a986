"""etc-ctl plan, as a person types it."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from launcher.ctl.planning.command import known_models, plan, read_model


def run(*arguments: str):
    return CliRunner().invoke(plan, list(arguments))


def test_an_account_names_nodes_bytes_and_seconds():
    result = run("--model", "gpt2", "--from", "PP2TP2", "--to", "PP4TP2", "--nodes", "2x4")
    assert result.exit_code == 0, result.output
    for words in ("gpt2: PP2TP2DP1 (4 ranks) -> PP4TP2DP1 (8 ranks)", "node-1", "kept in place", "no placement beats",
                  "predicted", "rounds", "peak state"):
        assert words in result.output


def test_json_is_complete_and_the_same_every_time(tmp_path):
    arguments = ("--model", "gpt2", "--from", "PP2TP2", "--to", "TP4", "--nodes", "2x4", "--json")
    first, second = run(*arguments), run(*arguments)
    assert first.output == second.output
    value = json.loads(first.output)
    assert value["moved_bytes"] + sum(value["kept_bytes"]) == sum(value["needed_bytes"])
    assert sum(map(sum, value["traffic_bytes"])) == value["moved_bytes"]
    assert value["digest"]


def test_the_policies_can_be_compared():
    arguments = ("--model", "etc-table2", "--from", "PP4TP2", "--to", "PP6TP4", "--nodes", "6x4", "--json")
    ours, paper = (json.loads(run(*arguments, *more).output) for more in (("--least", "bytes"), ("--policy", "paper")))
    assert ours["moved_bytes"] < paper["moved_bytes"]
    assert ours["bottleneck_s"] <= paper["bottleneck_s"]


def test_forwarding_relieves_the_only_holder():
    arguments = ("--model", "gpt2", "--from", "DP1", "--to", "DP4", "--nodes", "4x1", "--json")
    plain, forwarded = (json.loads(run(*arguments, *more).output) for more in ((), ("--forwarding",)))
    assert max(sent for sent, _ in forwarded["ports"].values()) < 0.5 * max(sent for sent, _ in plain["ports"].values())
    assert forwarded["predicted_s"] < 0.5 * plain["predicted_s"]


def test_the_picture_is_a_well_formed_svg(tmp_path):
    path = tmp_path / "plan.svg"
    result = run("--model", "gpt2", "--from", "PP2TP2", "--to", "PP3", "--nodes", "2x2", "--plot", str(path))
    assert result.exit_code == 0, result.output
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    assert len(root.findall("{*}rect")) == 1 + 4 + 4 + 4


def test_without_a_target_the_best_config_is_chosen_and_explained():
    result = run("--model", "gpt2", "--from", "DP2", "--nodes", "1x4")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("chosen PP")
    assert "(4 ranks)" in result.output


def test_a_drained_node_gives_its_state_and_takes_none():
    arguments = ("--model", "gpt2", "--from", "DP4", "--to", "DP2", "--nodes", "2x2", "--exclude", "node-0", "--json")
    value = json.loads(run(*arguments).output)
    assert value["placement"] == ["node-1/0", "node-1/1"]


@pytest.mark.parametrize("name", known_models())
def test_every_shipped_model_can_be_planned(name):
    assert read_model(name).num_layers
    result = run("--model", name, "--from", "PP4TP2DP16", "--to", "PP2TP4DP17", "--nodes", "17x8")
    assert result.exit_code == 0, result.output


def test_shipped_models_have_the_parameters_that_they_are_known_for():
    known = {"gpt2": 0.124, "gpt3-6.7b": 6.66, "llama3-8b": 8.03, "llama3-70b": 70.6, "mixtral-8x7b": 46.7,
             "etc-table2": 4.23}
    from etc_agent.parallel.config import ParallelConfig
    from etc_agent.state.sharding import Sharding

    for name, billions in known.items():
        sharding = Sharding(read_model(name), ParallelConfig())
        size = sum(box.num_elements for unit in sharding.units() for box in sharding.boxes(unit.spec, 0))
        assert size / 1e9 == pytest.approx(billions, rel=0.01), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt5", "--from", "PP1", "--to", "PP2", "--nodes", "1x2"), "none of the known models (etc-table2"),
        (("--model", "gpt2", "--from", "P1", "--to", "PP2", "--nodes", "1x2"), "'P1' is not a parallel config"),
        (("--model", "gpt2", "--from", "PP1", "--to", "PP2", "--nodes", "2"), "write nodes x slots"),
        (("--model", "gpt2", "--from", "PP1", "--to", "PP4", "--nodes", "1x2"), "4 ranks need as many slots; 2 are"),
        (("--model", "gpt2", "--from", "PP4", "--to", "PP2", "--nodes", "1x2"), "has 4 ranks, --nodes 2 slots"),
        (("--model", "gpt2", "--from", "PP1", "--to", "TP5", "--nodes", "1x8"), "12 attention heads are not divisible"),
        (("--model", "gpt2", "--from", "PP1", "--to", "PP1", "--nodes", "1x8", "--exclude", "n"), "no node 'n'"),
        (("--model", "gpt2", "--from", "PP2", "--to", "PP1", "--nodes", "1x2", "--budget-gib", "1"), "budget"),
        (("--model", "gpt2", "--from", "PP2", "--to", "x", "--nodes", "1x2"), "--to: 'x' is not a parallel config"),
        (("--model", "gpt2", "--from", "PP2", "--to", "PP1", "--nodes", "9999999x8"), "slots are more than"),
        (("--model", "gpt2", "--from", "PP2", "--to", "PP1", "--nodes", "1x2", "--nic-gbit", "nan"), "finite"),
        (("--model", "gpt2", "--from", "PP2", "--to", "PP1", "--nodes", "1x2", "--plot", "/no/x.svg"), "--plot /no/x"),
        (("--model", "/", "--from", "PP2", "--to", "PP1", "--nodes", "1x2"), "--model /: Is a directory"),
        (("--model", "gpt2", "--from", "PP2", "--to", "PP1", "--nodes", "1x2", "--policy", "paper", "--pack"), "paper"),
    ],
)
def test_mistakes_get_one_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


def test_zero1_is_planned_for_hundreds_of_ranks():
    result = run("--model", "llama3-70b", "--from", "PP8TP8DP8", "--to", "PP8TP8DP7", "--nodes", "64x8", "--zero1")
    assert result.exit_code == 0
    assert "448 of 448 ranks on a worker that was there" in result.output


def test_a_job_too_large_for_zero1_is_refused_at_once():
    result = run("--model", "gpt2", "--from", "DP8192", "--to", "DP1024", "--nodes", "1024x8", "--zero1")
    assert result.exit_code == 1
    assert "leave ZeRO-1 out for an estimate" in result.output


def test_the_paper_table_is_reproduced_where_groups_may_be_split():
    row = ("--model", "etc-table2", "--from", "PP4TP2", "--to", "PP6TP4", "--nodes", "32x4", "--json")
    free = json.loads(run(*row, "--least", "bytes", "--split-groups").output)
    assert free["moved_bytes"] <= 40.3e9
    assert free["bottleneck_s"] <= 0.403
    assert json.loads(run(*row).output)["moved_bytes"] > free["moved_bytes"]


def test_no_bound_is_claimed_for_what_it_does_not_bound():
    change = ("--model", "gpt2", "--from", "PP1", "--to", "DP8", "--nodes", "1x2+1x8")
    assert "no placement beats" in run(*change).output
    assert "no placement beats" not in run(*change, "--forwarding").output
    assert "no placement beats" not in run(*change, "--policy", "paper").output
