"""What the product does, free of any transport: each adapter (HTTP today) calls these and maps the answers."""
