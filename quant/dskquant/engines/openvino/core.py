"""The one `ov.Core` of the process.

The CPU plugin that a core loads gives its thread an alternate signal stack, and the plugin's end unmaps that stack. Of
two cores, the second one's end puts the first one's stack back, unmapped or not, and the next signal that the thread
handles kills the process (SIGSEGV). A core that stays to the end of the process never takes its stack away.
"""

from __future__ import annotations

import openvino as ov

CORE = ov.Core()
