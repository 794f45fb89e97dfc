"""Jobs: files of requests that callers upload, which the gateway works off behind interactive calls."""
