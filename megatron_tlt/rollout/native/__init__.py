"""The embedded engine: torch alone, CPU and CUDA, one idea per file."""
