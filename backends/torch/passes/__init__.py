"""Engine of one model: schedule, run, resolve."""
