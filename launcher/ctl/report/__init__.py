"""The job report: one HTML page that stands alone, of a job's whole life.

`life` works it out from the records, `drawing` lays the pictures out, ``page.html.j2`` is the page.
"""
