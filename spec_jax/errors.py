"""What a user can do about a mistake: one exception type that the command line prints as a single line."""


class UserError(ValueError):
    """A value from the user that cannot be used. The message names the value, what is allowed, and the way out."""
