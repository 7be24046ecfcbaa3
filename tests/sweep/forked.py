"""Runs commands of the command line in forked processes, so that the imports are paid for once:
``python -m`` this.

Each line of stdin is a list of runs that begin together, {"args": [...], "kill_after": seconds or
none}. It is answered by a line with the exit statuses (-9: killed), after what the runs print.
"""

import json
import os
import signal
import sys
import time

ANSWER = "exit statuses: "


def main():
    import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401

    import embedgeo.cli
    import embedgeo.sweep.run

    for line in sys.stdin:
        runs = json.loads(line)
        pids = [start(embedgeo.cli.main, run["args"]) for run in runs]
        statuses = [wait(pid, run.get("kill_after")) for pid, run in zip(pids, runs, strict=True)]
        print(f"\n{ANSWER}{json.dumps(statuses)}", flush=True)


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
