"""etc-run's command line: who runs the job, which source wins, and what the agent is told."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etc_agent.agent.settings import EtcdSettings, JobSettings
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from launcher.routes import read
from launcher.run import main


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "ETC_", "TORCHELASTIC_", "TORCH_ELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


@pytest.fixture
def job_file(tmp_path: Path, script: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("""
        command: [train.py, --from-file]
        nodes: {min: 1, max: 2}
        workers_per_node: 4
        rendezvous: {run_id: from-file, endpoints: [file:2379]}
        parallel: {initial: PP2, allowed: [PP2, TP2]}
        max_restarts: 5
        timeouts: {lease_s: 5, shutdown_grace_s: 7.5}
        global_batch: 8
        env: {A: "1"}
    """)
    return str(path)


def settings(*argv: str) -> JobSettings:
    result = read(argv)
    assert isinstance(result, JobSettings)
    return result


def mistake(*argv: str) -> str:
    with pytest.raises(EtcError) as caught:
        read(argv)
    (line,) = str(caught.value).splitlines()
    return line


# ---- who runs the job ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [[], ["--nproc-per-node", "2"], ["--rdzv-backend=c10d", "--rdzv-endpoint=a:0"], ["--rdzv-backend", "etcd-v2"]],
)
def test_without_etcd_torchrun_gets_its_own_arguments(options: list[str], script: str) -> None:
    from torch.distributed.run import parse_args

    ours, theirs = read([*options, script, "--flag"]), parse_args([*options, script, "--flag"])
    assert isinstance(ours, argparse.Namespace)
    assert vars(theirs).items() <= vars(ours).items()


@pytest.mark.parametrize(
    ("options", "standalone"),
    [
        (["--standalone"], True),
        (["--etcd-endpoints=a:1", "--rdzv-id=x"], False),
        (["--rdzv-backend=etcd-v3", "--rdzv-endpoint=a:1", "--rdzv-id=x"], False),
    ],
)
def test_etcd_and_standalone_go_to_our_agent(options: list[str], standalone: bool, script: str) -> None:
    assert settings(*options, script).standalone is standalone


def test_what_is_typed_decides_the_route_before_the_environment(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETC_ENDPOINTS", "a:1")
    assert isinstance(read(["--rdzv-backend=c10d", script]), argparse.Namespace)
    assert settings("--standalone", script).standalone
    monkeypatch.setenv("PET_STANDALONE", "1")
    assert not settings("--etcd-endpoints=b:1", "--rdzv-id=x", script).standalone


def test_a_job_file_with_etcd_goes_to_our_agent_and_standalone_overrides_its_etcd(job_file: str) -> None:
    assert settings("--config", job_file).etcd.endpoints == ("file:2379",)
    private = settings("--config", job_file, "--standalone")
    assert private.standalone
    assert private.etcd.endpoints == ()


def test_options_that_torchrun_does_not_know_are_not_ignored_in_silence(script: str) -> None:
    assert mistake("--parallel=PP2", script).startswith("--parallel: this job has no etcd")


def test_contradictions_are_refused(script: str) -> None:
    assert "leave out --standalone" in mistake("--standalone", "--etcd-endpoints=a:1", script)
    assert "--etcd-user: --standalone starts an etcd of its own" in mistake("--standalone", "--etcd-user=ada", script)
    assert "--nnodes: --standalone is a job of one node" in mistake("--standalone", "--nnodes=2", script)
    assert "needs --rdzv-backend=etcd-v3" in mistake("--etcd-endpoints=a:1", "--rdzv-backend=c10d", script)


def test_an_address_that_nobody_can_reach_is_refused_before_workers_wait_for_it(script: str) -> None:
    said = mistake("--standalone", "--local-addr=no-such-host.invalid", script)
    assert said.startswith("--local-addr: 'no-such-host.invalid' is no address")
    assert settings("--standalone", "--local-addr=::1", script).local_addr == "::1"


# ---- the words behind the script -----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--p", "--m", "--n", "--etcd", "--config", "--parallel", "--rdzv", "--stand", "-r"])
def test_the_words_behind_the_script_are_the_scripts(word: str, script: str) -> None:
    assert settings("--standalone", script, word, "1").args[-2:] == (word, "1")
    theirs = read(["--nproc-per-node", "1", script, word, "1"])
    assert isinstance(theirs, argparse.Namespace)
    assert theirs.training_script_args == [word, "1"]


def test_options_of_torchrun_can_be_shortened_as_there_and_ours_do_not_stand_in_the_way(script: str) -> None:
    assert settings("--standalone", "--max-r", "2", script).max_restarts == 2
    assert settings("--stand", "--nproc=2", script).num_slots == 2


@pytest.mark.parametrize("options", [["--m", "1"], ["--parall", "PP2"]])
def test_a_word_before_the_script_that_could_be_several_options_is_refused(
    options: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(["--standalone", *options, script])
    assert f"unrecognized arguments: {options[0]}" in capsys.readouterr().err


def test_a_script_on_standard_input_is_refused_since_it_can_be_read_once() -> None:
    assert mistake("--standalone", "-").startswith("-: a script on standard input reaches one worker only")


# ---- which source wins ---------------------------------------------------------------------------------------------


def test_command_line_over_environment_over_file_over_default(job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings("--config", job_file).max_restarts == 5
    monkeypatch.setenv("PET_MAX_RESTARTS", "6")
    assert settings("--config", job_file).max_restarts == 6
    assert settings("--config", job_file, "--max-restarts", "7").max_restarts == 7
    monkeypatch.setenv("PET_NNODES", "1:8")
    monkeypatch.setenv("ETC_PARALLEL", "TP2")
    chosen = settings("--config", job_file)
    assert (chosen.max_nodes, chosen.parallel) == (8, ParallelConfig(tp=2))
    assert settings("--config", job_file, "--parallel", "PP2").parallel == ParallelConfig(pp=2)


def test_a_job_inside_a_worker_has_a_config_of_its_own(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETC_PARALLEL", "PP2TP2DP1")
    monkeypatch.setenv("ETC_CONTROL_SOCKET", "/of/the/outer/job")
    assert settings("--standalone", script).parallel is None


def test_an_option_typed_with_its_default_value_still_wins(job_file: str) -> None:
    assert settings("--config", job_file, "--max-restarts", "0").max_restarts == 0
    assert settings("--config", job_file, "--nnodes=1:1", "--nproc_per_node", "2").num_slots == 2


def test_the_file_gives_everything(job_file: str, tmp_path: Path) -> None:
    given = settings("--config", job_file)
    assert given.entrypoint == sys.executable
    assert given.args == ("-u", str(tmp_path / "train.py"), "--from-file")
    assert (given.run_id, given.min_nodes, given.max_nodes, given.num_slots) == ("from-file", 1, 2, 4)
    assert given.allowed == (ParallelConfig(pp=2), ParallelConfig(tp=2))
    assert (given.timeouts.lease_s, given.timeouts.shutdown_grace_s, given.timeouts.switch_s) == (5, 7.5, 1800)
    assert given.launch_config.shutdown_timeout == 8
    assert (given.global_batch, given.env) == (8, {"A": "1"})
    assert given.node_rank is None


def test_a_script_on_the_command_line_replaces_the_files_command(job_file: str) -> None:
    given = settings("--config", job_file, "-m", "http.server", "--from-file", "0")
    assert given.args == ("-u", "-m", "http.server", "--from-file", "0")


def test_the_config_file_may_come_from_the_environment(job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETC_CONFIG", job_file)
    assert settings().run_id == "from-file"


def test_rdzv_conf_changes_timeouts_by_our_names_and_by_torchruns(script: str) -> None:
    conf = "lease_s=3,last_call_timeout=4,read_timeout=6,is_host=1"
    timeouts = settings("--standalone", "--rdzv-conf", conf, script).timeouts
    assert (timeouts.lease_s, timeouts.settle_s, timeouts.etcd_s) == (3, 4, 6)
    assert settings("--standalone", "--rdzv-conf", "settle_s=0", script).timeouts.settle_s == 0
    assert "did you mean lease_s?" in mistake("--standalone", "--rdzv-conf", "leese_s=3", script)
    assert "expected a positive number" in mistake("--standalone", "--rdzv-conf", "lease_s=soon", script)


def test_shutdown_timeout_is_torchruns_with_all_its_sources(job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")
    assert settings("--config", job_file).launch_config.shutdown_timeout == 9
    assert settings("--config", job_file, "--shutdown-timeout=3").timeouts.shutdown_grace_s == 3


# ---- what the agent is told ----------------------------------------------------------------------------------------


def test_node_rank_is_told_only_where_it_was_given(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings("--standalone", script).node_rank is None
    assert settings("--standalone", "--node-rank=0", script).node_rank == 0
    monkeypatch.setenv("PET_NODE_RANK", "3")
    assert settings("--standalone", script).node_rank == 3


def test_parity_on_one_node_is_refused_whoever_says_that_there_is_one(script: str, tmp_path: Path) -> None:
    path = tmp_path / "parity.yaml"
    path.write_text("redundancy: parity\nnodes: {min: 1, max: 2}\nrendezvous: {run_id: job, endpoints: ['h:1']}\n")
    assert settings("--config", str(path), script).redundancy == Redundancy(Scheme.PARITY)
    said = mistake("--config", str(path), "--nnodes", "1", script)
    assert "redundancy: parity needs at least 2 nodes, got 1; give more, or write redundancy: peer" in said


def test_redirects_of_local_ranks_above_nine_are_accepted(script: str) -> None:
    from torch.distributed.elastic.multiprocessing import Std

    logs_specs = settings("--standalone", "-r", "10:3,1:1", script).launch_config.logs_specs
    assert logs_specs._redirects == {10: Std.ALL, 1: Std.OUT}


def test_run_path_gives_a_function(script: str) -> None:
    given = settings("--standalone", "--run-path", script, "x")
    assert callable(given.entrypoint)
    assert given.args == (script, "x")


def test_endpoints_are_normal_forms_of_what_was_typed(script: str) -> None:
    given = settings("--etcd-endpoints", "http://a:1, b ,[::1]:3", "--rdzv-id=x", script)
    assert given.etcd.endpoints == ("a:1", "b:2379", "[::1]:3")
    assert settings("--etcd-endpoints", "https://a", "--rdzv-id=x", script).etcd.endpoints == ("https://a:2379",)
    private = "unix:///tmp/etc-run-x/etcd.sock:0"
    assert settings("--etcd-endpoints", private, "--rdzv-id=x", script).etcd.endpoints == (private,)


def test_the_password_comes_from_a_file_or_the_environment_and_is_never_shown(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    common = ["--etcd-endpoints=a:1", "--rdzv-id=x", "--etcd-user=me"]
    given = settings(*common, "--etcd-password-file", str(secret), script)
    assert given.etcd.password == "hunter2"
    assert "hunter2" not in repr(given)
    monkeypatch.setenv("ETC_PASSWORD", "from-environment")
    assert settings(*common, script).etcd.password == "from-environment"
    assert settings(*common, "--etcd-password-file", str(secret), script).etcd.password == "hunter2"


def test_rdzv_conf_of_the_torchrun_backend_means_the_same_here(script: str, tmp_path: Path) -> None:
    secret, pem = tmp_path / "secret", tmp_path / "ca.pem"
    secret.write_text("hunter2")
    pem.write_text("")
    conf = f"user=me,password_file={secret},ca_cert={pem},prefix=/p,protocol=https,node_rank=2"
    given = settings("--rdzv-backend=etcd-v3", "--rdzv-endpoint=a:1", "--rdzv-id=x", "--rdzv-conf", conf, script)
    assert given.etcd == EtcdSettings(("https://a:1",), "/p", pem, user="me", password="hunter2")
    assert given.node_rank == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--etcd-endpoints=a:1"], "the job has no name"),
        (["--etcd-endpoints=a:b:c", "--rdzv-id=x"], "--etcd-endpoints: 'a:b:c' is not an etcd server"),
        (["--rdzv-backend=etcd-v3", "--rdzv-id=x"], "no etcd server given"),
        (["--etcd-endpoints=a:1", "--rdzv-id=x", "--etcd-user=me"], "user me without a password"),
        (["--etcd-endpoints=a:1", "--rdzv-id=x", "--etcd-ca-file=/none.pem"], "--etcd-ca-file: /none.pem cannot be"),
        (["--standalone", "--nnodes=many"], "--nnodes: 'many' is not a number of nodes"),
        (["--standalone", "--nnodes=3:2"], "--nnodes: '3:2' is not a number of nodes"),
        (["--standalone", "--nproc-per-node=some"], "--nproc-per-node: 'some' is not a number of workers; write"),
        (["--standalone", "--nproc-per-node=gpu"], "--nproc-per-node: gpu: Cuda is not available."),
        (["--standalone", "--nproc-per-node=0"], "--nproc-per-node: expected at least 1"),
        (["--standalone", "--parallel=PP"], "--parallel: 'PP' is not a parallel config"),
        (["--standalone", "--parallel=PP4"], "--parallel: PP4TP1DP1 needs 4 workers, the job admits 1"),
        (["--standalone", "--allowed=PP1,DP9"], "--allowed: PP1TP1DP9 needs 9 workers, the job admits 1"),
        (["--standalone", "--max-restarts=-1"], "--max-restarts: expected 0 or more, got -1"),
        (["--standalone", "-r", "7"], "--redirects: '7' does not name streams"),
        (["--standalone", "--signals-to-handle=SIGTERM,SIGUSER1"], "'SIGUSER1' is not a signal; did you mean SIGUSR1?"),
        (["--standalone", "--signals-to-handle=SIGKILL"], "--signals-to-handle: SIGKILL cannot be handled"),
        (["--standalone", "--event-log-handler=consol"], "'consol' is not a registered event handler; known: console"),
        (["--standalone", "--rdzv-conf=join_timeot=3"], "unknown key join_timeot; did you mean join_timeout?"),
        (["--standalone", "--rdzv-conf=colour=red"], "--rdzv-conf: unknown key colour; known: ca_cert"),
        (["--standalone", "--log-dir=/proc/logs"], "--log-dir: no folder for logs can be made: /proc/logs: No"),
        (["--standalone", "--logs-specs=none"], "Could not find entrypoint under 'torchrun.logs_specs[none]'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(options: list[str], said: str, script: str) -> None:
    assert said in mistake(*options, script)


def test_the_source_of_a_mistake_is_named(job_file: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "two")
    assert mistake("--standalone", script).startswith("PET_NPROC_PER_NODE: 'two' is not a number of workers")
    monkeypatch.delenv("PET_NPROC_PER_NODE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert mistake("--standalone", "--nproc-per-node=3", "--virtual-local-rank", script) == (
        "--virtual-local-rank: CUDA_VISIBLE_DEVICES=0,1 shows 2 devices, and local rank 2 has none; "
        "lower --nproc-per-node"
    )


def test_a_mistake_leaves_no_log_folder(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for option in ("--parallel=PP4", "--rdzv-id=a/b", "--nproc-per-node=0", "--signals-to-handle=x"):
        mistake("--standalone", option, script)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_missing_script_is_said_before_anything_starts(job_file: str, tmp_path: Path) -> None:
    assert mistake("--standalone", "/no/such.py") == "/no/such.py: no such training script"
    (tmp_path / "train.py").unlink()
    assert "train.py does not exist" in mistake("--config", job_file)


def test_an_option_that_breaks_the_files_config_is_said(job_file: str) -> None:
    assert mistake("--config", job_file, "--nproc-per-node=1", "--nnodes=1").startswith(
        f"{job_file}: parallel.allowed: PP2TP1DP1 needs 2 workers, the job admits 1"
    )


# ---- the program itself --------------------------------------------------------------------------------------------


def test_main_prints_one_line_and_exits_2_on_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--standalone", "/no/such.py"]) == 2
    assert capsys.readouterr().err == "etc-run: /no/such.py: no such training script\n"


def test_a_flags_variable_that_is_no_number_is_one_line(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "true")
    assert mistake(script).startswith("a PET_ variable that stands for a flag must be 0 or 1")


def test_ctrl_c_while_torch_loads_is_one_line(script: str) -> None:
    started = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "launcher.run", "--standalone", script],
        stderr=subprocess.PIPE, text=True,
    )
    assert started.stderr is not None
    for line in started.stderr:  # the interpreter says what it has imported
        if line.rstrip().endswith("| torch.version") or " torch." in line:
            break
    started.send_signal(signal.SIGINT)
    rest = [line for line in started.stderr.read().splitlines() if not line.startswith("import time:")]
    assert (started.wait(30), rest) == (130, ["etc-run: interrupted"])


def test_without_script_or_job_file_the_usage_is_torchruns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "the following arguments are required: training_script, training_script_args" in capsys.readouterr().err


def test_a_plain_job_runs_exactly_as_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(
        "import json, os, sys, time\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'TORCHELASTIC_MAX_RESTARTS']\n"
        "values = {name: os.environ[name] for name in names}\n"
        "path = f'{sys.argv[1]}-{os.environ[\"RANK\"]}'\n"
        "open(path + '.new', 'w').write(json.dumps([values, sys.argv[2:]]))\n"
        "os.rename(path + '.new', path)\n"
        "while not all(os.path.exists(f'{sys.argv[1]}-{rank}') for rank in (0, 1)):  # the first to fail ends both\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    results = {}
    for name, module in (("theirs", "torch.distributed.run"), ("ours", "launcher.run")):
        out = tmp_path / name
        command = [sys.executable, "-m", module, "--nproc-per-node=2", str(program), str(out), "--flag"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "exitcode  : 3" in ended.stderr
        results[name] = [ended.returncode, *(json.loads(Path(f"{out}-{rank}").read_text()) for rank in (0, 1))]
    assert results["ours"] == results["theirs"]


def test_standalone_runs_the_job_under_our_agent_and_gives_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "show.py"
    program.write_text(
        "import os, sys\n"
        "open(f'{sys.argv[1]}-{os.environ[\"RANK\"]}', 'w').write(os.environ.get('ETC_PASSWORD', 'no password'))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    monkeypatch.setenv("ETC_PASSWORD", "hunter2")
    for code in (0, 3):
        command = [sys.executable, "-m", "launcher.run", "--standalone", "--nproc-per-node=2", str(program)]
        ended = subprocess.run(
            [*command, str(tmp_path / "out"), str(code)], capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == code, ended.stderr
    assert (tmp_path / "out-1").read_text() == "no password"


def test_a_range_of_ports_is_typed_or_in_the_environment(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(settings("--standalone", "--port-range", "29500-29599", script).port_range) == "29500-29599"
    assert "--port-range: '29500' is no range of ports" in mistake("--standalone", "--port-range=29500", script)
    monkeypatch.setenv("ETC_PORT_RANGE", "30000-30100")
    assert str(settings("--standalone", script).port_range) == "30000-30100"
