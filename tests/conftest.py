"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# The same examples in each run (fuzz/ is for new ones), and a busy machine fails no test.
settings.register_profile(
    "tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that; but
# tests interrupt the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
