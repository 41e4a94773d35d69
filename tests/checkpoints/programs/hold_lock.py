"""Takes the lock of a MODEL_DIR, says so, and sleeps. Usage: hold_lock.py MODEL_DIR [fork]

With `fork`, a forked child (as a data worker would be) sleeps too, and its process id is printed.
"""

import os
import sys
import time

from t5x.checkpoints import ModelDirLock

lock = ModelDirLock(sys.argv[1])
if sys.argv[2:] == ["fork"]:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print(child)
else:
    print("held")
time.sleep(600)
