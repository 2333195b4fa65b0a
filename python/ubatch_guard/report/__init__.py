"""What is shown of an audit: in words and tables, as a page of pictures, and as a trace for Perfetto."""
