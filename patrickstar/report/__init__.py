"""What a recorded run did, for people: one page of HTML, or a trace for Perfetto.

`read_run` reads a run folder that `patrickstar.engine.run_folder` wrote; `curves`, `memory`,
`timeline`, `chunk_map` and `reality` are pure functions from what was read to figures; `page` puts
them together. `perfetto` writes the same events in the trace-event format.

Everything that was recorded is data, whatever it looks like: it is checked when it is read and
escaped where it is shown.
"""

from patrickstar.report.page import page
from patrickstar.report.perfetto import trace_events
from patrickstar.report.run import Run, RunFolderError, read_run

__all__ = ["Run", "RunFolderError", "page", "read_run", "trace_events"]
