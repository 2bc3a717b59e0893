"""Reward functions that misbehave, for the tests of the worker processes."""

import os
import signal
import subprocess
import sys
import time


def obey(data_source, solution_str, ground_truth, extra_info):
    """Does what the response says."""
    command, _, rest = solution_str.partition(" ")
    if command == "hang":
        while True:
            pass
    if command == "block":  # deaf to everything but SIGKILL
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    if command == "hog":
        return len(bytearray(2**30))
    if command == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if command == "exit":
        sys.exit(3)
    if command == "raise":
        raise KeyError(rest)
    if command == "child":  # leaves a process of its own behind, then hangs
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(rest, "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if command == "print":
        print('{"score": 99}', flush=True)
    if command == "nan":
        return float("nan")
    if command == "pid":
        return os.getpid()
    if command == "slow":
        time.sleep(float(rest))
    return {"score": float(solution_str == ground_truth), "other": 1}


not_callable = 3
