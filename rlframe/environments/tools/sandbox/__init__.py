"""Runs programs that nobody trusts. `box` chooses how a program is shut in, `running` runs it and looks at its limits,
`inside` is what it begins with, `filter` is the list of system calls that it cannot make."""
