"""Exports to other formats: `exporter.export` makes and checks one; see docs/export.md."""
