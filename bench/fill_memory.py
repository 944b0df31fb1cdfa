"""Fill memory and give it back, so that the process that follows gets pages that the machine holds
already.

Its one argument is the number of bytes.
"""

import mmap
import os
import sys

# without what the page cache could give up
available = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
nbytes = min(int(sys.argv[1]), available)
memory = mmap.mmap(-1, nbytes)
for at in range(0, nbytes, mmap.PAGESIZE):
    memory[at] = 1
