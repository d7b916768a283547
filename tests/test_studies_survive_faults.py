"""A study whose processes, machines or driver are killed ends as if they had not been: no run is lost, none begins again."""

import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

from sb3_td3x.common import lock
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.signals import stopping_on_signal
from sb3_td3x.errors import EnvironmentDiedError, RunLockedError
from sb3_td3x.runs import runners
from sb3_td3x.runs.study import StudyFolder
from tests.commands import start, wait_until
from tests.resuming import leave_lock
from tests.studies import Outcome, made, nodes, resumed_at, saved_steps, study, tables, train_and_be_lost_once


def attempts(path, run):
    """The step that each attempt began at."""
    log = StudyFolder.at(path).run(run) / "output.log"
    return [int(step.replace(",", "")) for step in re.findall(r"at step ([\d,]+) of", log.read_text())] if log.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study that nobody disturbs."""
    path = tmp_path_factory.mktemp("whole")
    made(study(path / "s.yml"), path)
    return tables(path)


class TestWorkers:
    def test_a_lost_process_of_a_run_or_its_environment_is_replaced_and_the_run_resumed_exactly(self, whole, tmp_path):
        self.check(whole, tmp_path, runners.local(2))

    def test_a_lost_ray_worker_is_replaced_and_two_nodes_give_the_scores_of_one_machine(self, whole, tmp_path):
        with nodes(1, 1) as (cluster, _):
            self.check(whole, tmp_path, runners.on_ray(cluster.address))

    def check(self, whole, path, runner):
        runs = study(path / "s.yml")
        outcomes = made(runs, path, runner, train_and_be_lost_once)
        assert all(outcome.is_finished for outcome in outcomes.values())
        assert [attempts(path, run) for run in runs] == [[0, 200]] * 2
        assert tables(path) == whole

    def test_a_process_that_is_killed_again_and_again_is_given_up(self, tmp_path, monkeypatch):
        monkeypatch.setattr(runners, "RETRIES", 1)
        (run,) = runs = study(tmp_path / "s.yml", seeds=[0])
        error = made(runs, tmp_path, runners.local(1), killed)[run.name].error
        assert error == "it was lost 2 times; at last its process ended with -9 (memory may have run out: fewer --jobs)"
        error = made(runs, tmp_path, runners.local(1), without_environment)[run.name].error
        assert error == "EnvironmentDiedError: the process of environment 0 ended with exit code -9"

    def test_a_run_that_fails_says_why_and_threads_that_one_leaves_are_not_waited_for(self, tmp_path):
        leaves, fails, links = runs = study(tmp_path / "s.yml", seeds=[0, 1, 2])
        log = StudyFolder.at(tmp_path).printed(links)
        log.parent.mkdir(parents=True)
        log.symlink_to(tmp_path / "mine")  # so that the reason is in no log
        outcomes = made(runs, tmp_path, runners.local(2), leaving_a_thread_or_failing)
        assert outcomes[leaves.name].is_finished
        assert outcomes[fails.name] == Outcome(fails, False, "ValueError: no luck")
        assert "output.log is a link, through which" in outcomes[links.name].error


def finished(run, path):
    path.joinpath("scores.csv").write_text("")
    return True


def leaving_a_thread_or_failing(run, path):
    if run.seed == 1:
        raise ValueError("no luck")
    threading.Thread(target=time.sleep, args=(1e6,)).start()
    return finished(run, path)


def killed(run, path):
    os.kill(os.getpid(), signal.SIGKILL)


def without_environment(run, path):
    raise EnvironmentDiedError([0], "ended with exit code -9")


class TestLocks:
    def test_that_of_a_lost_machine_is_waited_for(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "LEASE_SECONDS", 1.5)
        (run,) = runs = study(tmp_path / "s.yml", seeds=[0])
        folder = StudyFolder.at(tmp_path).run(run)
        folder.mkdir(parents=True)
        leave_lock(folder, host="elsewhere", pid=1)
        assert made(runs, tmp_path, train=finished)[run.name].is_finished

    def test_that_of_a_process_that_is_about_to_leave_is_waited_for(self, tmp_path):
        """As one that saves its last checkpoint while the study is begun again."""

        def alone(run, path):
            with RunLock(path):
                return finished(run, path)

        (run,) = runs = study(tmp_path / "s.yml", seeds=[0])
        folder = StudyFolder.at(tmp_path).run(run)
        folder.mkdir(parents=True)
        with ExitStack() as held:
            held.enter_context(RunLock(folder))
            leaves = threading.Timer(1, held.close)
            leaves.start()
            outcomes = made(runs, tmp_path, train=alone)
            leaves.join()
        assert outcomes[run.name].is_finished


def told(connection):
    """In a process that ignores Ctrl-C, as a study's do: how often signals said to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup began the tests
    stops = []
    with stopping_on_signal(lambda: stops.append(1)):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            connection.send(len(stops))


def test_a_terminals_ctrl_c_is_for_the_study_which_tells_its_runs():
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=told, args=(sender,))
    process.start()
    sender.close()  # an end of the process is an end of the pipe
    process.join()
    assert [receiver.recv() for _ in range(5)] == [0, 0, 1, 2, 2]


# The command, whose runs wait after each 200 steps until they are asked to stop
WAITING = """
from sb3_td3x.cli import main
from sb3_td3x.runs import study
from tests.studies import train_until_asked_to_stop
study.train_td3x = train_until_asked_to_stop
main()
"""


class TestDrivers:
    def test_two_on_one_study_are_refused(self, tmp_path, refused):
        runs = study(tmp_path / "s.yml")
        folder = StudyFolder.at(tmp_path / "out")
        folder.runs.mkdir(parents=True)
        with RunLock(folder.runs):
            printed = refused("study", tmp_path / "s.yml", "--out", tmp_path / "out")
            with pytest.raises(RunLockedError):
                made(runs, tmp_path / "out")
        assert f"is being written by process {os.getpid()}" in printed

    def test_a_second_ctrl_c_aborts_while_a_run_hangs_and_leaves_no_process(self, tmp_path):
        study(tmp_path / "s.yml", envs=["tests.stoppable:Hanging-v0"], seeds=[0], n_envs=2)
        log = (tmp_path / "log").open("w")
        command = ("study", tmp_path / "s.yml", "--jobs", 1, "--out", tmp_path)
        process = start(*command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        printed = tmp_path / "log"  # of the environments too
        wait_until(lambda: printed.read_text().count("no way back") == 2, process)
        runs = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping; Ctrl-C again aborts" in printed.read_text(), process)
        process.send_signal(signal.SIGTERM)  # a closed terminal may send two
        time.sleep(1)
        assert process.poll() is None, "it waits for the run"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 1
        assert psutil.wait_procs(runs, timeout=10)[1] == []

    def test_ctrl_c_then_a_kill_then_the_same_study_on_ray_finishes(self, tmp_path, called_and_heard):
        runs = study(tmp_path / "s.yml")
        out = tmp_path / "out"
        command = ("study", tmp_path / "s.yml", "--jobs", 2, "--out", out)

        def started_until(steps):
            process = start(*command, program=("-c", WAITING), stdout=-1, stderr=-2)
            wait_until(lambda: all(saved_steps(out, run)[-1:] == [steps] for run in runs))
            return process

        process = started_until(200)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "stopped; each run resumes from its last checkpoint" in printed
        assert not any((StudyFolder.at(out).run(run) / "lock").exists() for run in runs)

        process = started_until(400)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any((StudyFolder.at(out).run(run) / "lock").exists() for run in runs))  # its runs have saved
        on_ray = ("study", tmp_path / "s.yml", "--ray", "local", "--out", out)
        assert "2 of 2 runs are done" in called_and_heard(*on_ray)[1].out
        assert (out / "summary.csv").read_text().count("\n") == 3
        assert "done before: 2" in called_and_heard(*command)[1].out
        assert [attempts(out, run) for run in runs] == [[0, 200, 400]] * 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_three_of_four_nodes_are_lost_and_their_runs_resume_on_another(tmp_path):
    runs = study(tmp_path / "s.yml", seeds=list(range(8)), steps=2500)

    def lose(cluster, lost):
        for node in lost:
            time.sleep(15)
            cluster.remove_node(node, allow_graceful=False)

    with nodes(1, 1, 1, 1) as (cluster, (_, *lost)):
        losses = threading.Thread(target=lose, args=(cluster, lost))
        losses.start()
        outcomes = made(runs, tmp_path, runners.on_ray(cluster.address))
        losses.join()
    assert all(outcome.is_finished for outcome in outcomes.values())
    assert any(resumed_at(tmp_path, run) for run in runs if len(attempts(tmp_path, run)) > 1)
    assert all(attempts(tmp_path, run) == sorted(attempts(tmp_path, run)) for run in runs)
