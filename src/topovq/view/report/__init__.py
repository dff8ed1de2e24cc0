"""What a run is, on one page: `topovq report RUN [RUN ...]`."""

from topovq.view.report.page import CURVES, DEMO_FILE, DEMO_LINK, REPORT_FILE, write_page, write_report
from topovq.view.report.study import Study, study, with_channels

__all__ = [
    "CURVES",
    "DEMO_FILE",
    "DEMO_LINK",
    "REPORT_FILE",
    "Study",
    "study",
    "with_channels",
    "write_page",
    "write_report",
]
