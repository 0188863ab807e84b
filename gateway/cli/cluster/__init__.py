"""Ray and Serve as the commands use them: head, application, state, lock, waits."""
