"""Takes the lock of a MODEL_DIR, says so, and sleeps. Usage: hold_lock.py MODEL_DIR [fork]

With `fork`, a forked child (as a data worker would be) says its process id once it runs, and sleeps too.
"""

import os
import sys
import time

from t5x.checkpoints import ModelDirLock

lock = ModelDirLock(sys.argv[1])
if sys.argv[2:] == ["fork"]:
    if os.fork() == 0:
        print(os.getpid())
        time.sleep(600)
        os._exit(0)
else:
    print("held")
time.sleep(600)
