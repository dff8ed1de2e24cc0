"""What a run is, on one page: `topovq report RUN [RUN ...]`."""

from topovq.report.page import REPORT_FILE, write_report
from topovq.report.study import Study, psnr, ssim, study, with_channels

__all__ = ["REPORT_FILE", "Study", "psnr", "ssim", "study", "with_channels", "write_report"]
