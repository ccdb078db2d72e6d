"""Tables of papers: from a YAML to cells, and from their records to Markdown, CSV and LaTeX."""
