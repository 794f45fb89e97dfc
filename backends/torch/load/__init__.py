"""From a folder of files to a loaded model."""
