"""The one exception a user is meant to read: a plain sentence that says what is wrong and what to do."""


class ForgefieldError(Exception):
    """Something the user can mend. The message names the place (file, key, frame) and what would be right."""


class SourceUnreadable(ForgefieldError):
    """A source of data that could not be read, as opposed to one that holds something wrong: trying again may help."""
