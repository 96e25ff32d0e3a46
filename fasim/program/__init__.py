"""What a schedule is: the language it is recorded in, its operations and effects, its rules, and where to find it."""
