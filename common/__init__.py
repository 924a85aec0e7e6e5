"""The core that every Tabrelay process shares; it knows neither Flask nor Celery."""
