"""What holds for all tests."""

import signal

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that; but
# tests interrupt the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
