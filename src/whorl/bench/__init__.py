"""The program behind `whorl bench`: cases, contenders, checks before times, results, report."""
