"""The report as one HTML file: run files in, a page that needs no network out."""
