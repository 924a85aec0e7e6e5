"""`tabrelay up`: the whole service on one machine, as one command or one `with` block.

`stack.run_up` runs it here, `embedded.Stack` runs it as a child of the calling program.
"""
