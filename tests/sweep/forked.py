"""Runs commands of the command line in forked processes, so that the imports are paid for once:
``python -m`` this.

Reads from stdin {"runs": [{"args": [...], "kill_after": seconds or null}], "parallel": bool}; the
last line it prints are the exit statuses (-9: killed) and how long each took.
"""

import json
import os
import signal
import sys
import time


def main():
    import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401

    import embedgeo.cli
    import embedgeo.sweep.run

    job = json.load(sys.stdin)
    statuses, seconds = [], []
    if job.get("parallel"):
        pids = [start(embedgeo.cli.main, run["args"]) for run in job["runs"]]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    else:
        for run in job["runs"]:
            begun = time.monotonic()
            statuses.append(wait(start(embedgeo.cli.main, run["args"]), run.get("kill_after")))
            seconds.append(time.monotonic() - begun)
    print(json.dumps([statuses, seconds]))


def start(command, args):
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        status = command(args)
    except SystemExit as error:
        status = error.code
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(pid, kill_after):
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        ended, status = os.waitpid(pid, 0 if deadline is None else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = None
        time.sleep(0.002)


if __name__ == "__main__":
    main()
