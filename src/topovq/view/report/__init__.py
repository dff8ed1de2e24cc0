"""What a run is, on one page: `topovq report RUN [RUN ...]`."""

from topovq.view.report.page import REPORT_FILE, write_report
from topovq.view.report.study import Study, ssim, study, with_channels

__all__ = ["REPORT_FILE", "Study", "ssim", "study", "with_channels", "write_report"]
