"""Report of finished or running runs: one HTML file that needs no network, and pictures."""
