"""The watched directory: quant configs dropped there are applied, and taken back when they go.

Events of the kernel are only hints to look again; what counts is the content of the files. Reading them is `scan`,
waiting until they stand still `settling`, what they mean together `drop_ins`, what is to be done about it `plan`;
`watcher` ties these to threads, clock and models.
"""

from dskd.watch.target import Target
from dskd.watch.watcher import Watcher

__all__ = ["Target", "Watcher"]
