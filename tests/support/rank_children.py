"""A rank that forks, and starts a program: prints whether it is a rank, how the child ended, the program's ranks."""

import os
import subprocess
import sys
import time

import autokern
from autokern.system import ranks

autokern.enable()
pid = os.fork()
if not pid:
    sys.exit(3)
for _ in range(600):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(pid, 9)
    status = os.waitpid(pid, 0)[1]
program = "import autokern; autokern.enable(); from autokern.system import ranks; print(ranks.held)"
command = [sys.executable, "-c", program]
told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout
print("found", ranks.held is not None, os.waitstatus_to_exitcode(status), told.strip(), flush=True)
