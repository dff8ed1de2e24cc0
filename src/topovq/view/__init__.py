"""Pictures, reports and the explorer."""
