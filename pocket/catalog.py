"""Tools written by hand, with natural requests. Agents and demos of many fields offer such tools.

A line of ``parameters`` has the form ``name|other_name:kind`` (``?`` after the names: optional; ``enum=a|b``: choices).
Each conversation draws one of the names. ``{0}`` in a request is the value of the first parameter.
"""

from __future__ import annotations

import random

from pocket.tools import Field, Parameter, Tool

Row = tuple[str, str, str, str, str]
"""Name, description, parameters, requests divided by ``;``, result fields."""

CATALOG: dict[str, tuple[Row, ...]] = {
    "travel": (
        (
            "get_weather|get_current_weather|weather",
            "Get the current weather for a city.",
            "city|location|place:city unit|units?:enum=celsius|fahrenheit",
            "what is the weather in {0};what's the weather in {0};what's the weather like in {0};"
            "how is the weather in {0} today;weather in {0};is it raining in {0};is it cold in {0} right now;"
            "tell me the weather for {0};check the weather in {0};how warm is it in {0};"
            "I'm going to {0}, what is the weather there;do I need an umbrella in {0}",
            "temperature:integer condition:word=sunny|cloudy|rain|snow|windy|fog|clear humidity:integer",
        ),
        (
            "get_forecast",
            "Get the weather forecast for the coming days.",
            "city|location:city days?:integer",
            "what is the forecast for {0};give me the forecast for {0};how will the weather be in {0} this week;"
            "forecast for {0}",
            "forecast:word=sunny|cloudy|rain|snow|windy high:integer low:integer",
        ),
        (
            "search_flights|find_flights",
            "Search flights between two cities.",
            "origin|from_city|from:city destination|to_city|to:city date|departure_date?:date passengers?:integer",
            "find flights from {0} to {1};search flights from {0} to {1};I want to fly from {0} to {1};"
            "flights {0} to {1};show me flights from {0} to {1};is there a flight from {0} to {1};"
            "I need to get from {0} to {1} by plane",
            "flight:id price:integer departure:time",
        ),
        (
            "book_hotel|reserve_hotel",
            "Book a hotel room.",
            "city|location:city check_in|date:date nights?:integer guests?:integer",
            "book a hotel in {0} on {1};book me a hotel in {0} from {1};reserve a room in {0} for {1};"
            "I need a hotel in {0} on {1};get me a hotel room in {0} for {1}",
            "hotel:word booking_id:id price:integer",
        ),
        (
            "search_hotels",
            "Search hotels in a city.",
            "city|location:city max_price?:integer",
            "find hotels in {0};search for hotels in {0};which hotels are there in {0};I need a place to stay in {0}",
            "hotel:word price:integer rating:number",
        ),
        (
            "search_restaurants|find_restaurants",
            "Search restaurants in a city.",
            "city|location:city cuisine?:enum=italian|french|japanese|indian|mexican|thai|chinese",
            "find restaurants in {0};where can I eat in {0};search for restaurants in {0};"
            "find a good {1} restaurant in {0};any {1} food in {0};recommend a restaurant in {0}",
            "restaurant:word rating:number address:text",
        ),
        (
            "create_itinerary|plan_trip",
            "Create a travel itinerary.",
            "city|destination:city days|duration:integer interests?:list",
            "create an itinerary for {1} days in {0};plan a {1} day trip to {0};"
            "make me a {1} day itinerary for {0};plan {1} days in {0}",
            "itinerary_id:id summary:query days:integer",
        ),
        (
            "book_flight",
            "Book a flight by its number.",
            "flight|flight_id|flight_number:id passenger?:person",
            "book flight {0};book the flight {0};I take flight {0}, book it;reserve flight {0}",
            "booking_id:id status:word=confirmed|ok",
        ),
        (
            "get_time|get_current_time",
            "Get the current time in a city.",
            "city|location|timezone:city",
            "what time is it in {0};what is the time in {0};current time in {0};tell me the time in {0}",
            "time:time",
        ),
        (
            "get_exchange_rate|convert_currency",
            "Convert an amount between currencies.",
            "amount:integer from_currency|from:currency to_currency|to:currency",
            "convert {0} {1} to {2};how much is {0} {1} in {2};what are {0} {1} worth in {2};change {0} {1} into {2}",
            "rate:number amount:number",
        ),
    ),
    "coding": (
        (
            "read_file|open_file|view_file",
            "Read the contents of a file.",
            "path|file|file_path:path",
            "read {0};open {0};show me {0};what is in {0};show the contents of {0};look at {0};read the file {0};"
            "print {0}",
            "content:text",
        ),
        (
            "write_file|create_file",
            "Write content to a file.",
            "path|file|file_path:path content|text:text",
            'write "{1}" to {0};write "{1}" into {0};create {0} with the content "{1}";save "{1}" to {0};'
            "put '{1}' in {0}",
            "status:word=ok|written bytes:integer",
        ),
        (
            "search_code|grep_code|code_search",
            "Search the code base for a text pattern.",
            "query|pattern:query path|directory?:folder",
            'search the code for "{0}";where is {0} used;find {0} in the code;grep for {0};'
            "search for '{0}' in the code base;which files mention {0}",
            "file:path line:integer",
        ),
        (
            "run_command|execute_command",
            "Run a command.",
            "command|cmd:command",
            "run {0};run `{0}`;execute {0};execute `{0}`",
            "exit_code:integer output:text",
        ),
        (
            "get_diagnostics",
            "Get compiler and linter messages for a file.",
            "path|file:path",
            "get the diagnostics for {0};are there errors in {0};any problems in {0};diagnostics of {0}",
            "errors:integer message:text",
        ),
        (
            "list_files|list_directory",
            "List the files of a directory.",
            "path|directory|folder:folder",
            "list the files in {0};what files are in {0};list {0};show me the folder {0}",
            "files:list",
        ),
        (
            "analyze_code",
            "Analyze the code of a file.",
            "path|file|file_path:path",
            "analyze {0};analyze the code in {0};examine the code of {0};what is wrong with {0}",
            "issues:integer complexity:number",
        ),
        (
            "run_tests",
            "Run the test suite.",
            "path|target:path verbose?:boolean",
            "run the tests in {0};run tests for {0};test {0};do the tests in {0} pass",
            "passed:integer failed:integer",
        ),
        (
            "check_coverage",
            "Check the test coverage of a file.",
            "path|file:path threshold?:integer",
            "check the coverage of {0};what is the coverage for {0};how well is {0} covered;coverage of {0}",
            "coverage:number",
        ),
        (
            "lint_code|run_linter",
            "Lint a file.",
            "path|file:path fix?:boolean",
            "lint {0};run the linter on {0};check the style of {0}",
            "warnings:integer errors:integer",
        ),
        (
            "review_pr|review_pull_request",
            "Review a pull request.",
            "pr_number|number|pr:integer repo|repository?:word",
            "review PR {0};review pull request {0};have a look at PR #{0};review #{0}",
            "comments:integer verdict:word=approve|reject|comment",
        ),
        (
            "edit_file|str_replace|apply_edit",
            "Replace a text in a file.",
            "path|file:path old|old_text:word new|new_text:word",
            'in {0}, replace {1} with {2};change {1} to {2} in {0};replace "{1}" by "{2}" in {0};'
            "rename {1} to {2} in {0}",
            "replacements:integer status:word=ok|done",
        ),
    ),
    "shell": (
        (
            "bash|shell|terminal",
            "Run a shell command.",
            "command|cmd:command",
            "run {0};run `{0}`;execute `{0}`;please run: {0};{0};in the shell, run {0}",
            "exit_code:integer stdout:text",
        ),
    ),
    "data": (
        (
            "query_db|query_database|run_query",
            "Run a query against the database.",
            "query|sql:sql database|db?:word",
            "run the query {0};query the database: {0};run this SQL: {0};execute {0};{0}",
            "rows:integer total:integer",
        ),
        (
            "create_chart|plot_chart",
            "Create a chart from a dataset.",
            "dataset|data|source:word chart_type|type:enum=bar|line|pie|scatter title?:query",
            "create a {1} chart of {0};make a {1} chart from {0};plot {0} as a {1} chart;draw a {1} chart for {0}",
            "chart_id:id url:url",
        ),
        (
            "export_data|export_dataset",
            "Export a dataset to a file.",
            "dataset|source|table:word format:enum=csv|json|parquet|xlsx",
            "export {0} as {1};export the {0} data to {1};save {0} as {1};I need {0} in {1} format",
            "path:path rows:integer",
        ),
        (
            "run_pipeline|start_pipeline",
            "Run a data pipeline.",
            "pipeline|name:word date?:date",
            "run the {0} pipeline;start the pipeline {0};kick off {0};run pipeline {0}",
            "run_id:id status:word=queued|running|done",
        ),
        (
            "compute_stats|get_statistics",
            "Compute statistics of a column.",
            "dataset|table:word column|field:word",
            "compute the stats of {1} in {0};statistics for {1} in {0};what are the stats for column {1} of {0};"
            "summarize {1} from {0}",
            "mean:number median:number max:integer",
        ),
        (
            "load_csv|load_dataset",
            "Load a dataset from a file.",
            "path|file:path",
            "load {0};load the dataset {0};import {0}",
            "dataset:word rows:integer",
        ),
    ),
    "web": (
        (
            "web_search|search_web|search",
            "Search the web.",
            "query|q:query num_results|limit?:integer",
            "search the web for {0};search for {0};google {0};look up {0};find information about {0};"
            'what can you find on {0};search "{0}"',
            "title:query url:url",
        ),
        (
            "fetch_page|open_url|browse",
            "Fetch a web page.",
            "url|link:url",
            "open {0};fetch {0};read {0};what does {0} say;summarize {0}",
            "title:query text:text",
        ),
        (
            "get_news|search_news",
            "Get news about a topic.",
            "topic|query:query limit?:integer",
            "news about {0};what is the news on {0};latest news about {0};any news on {0}",
            "headline:query source:word",
        ),
        (
            "search_wikipedia|wiki",
            "Look up an encyclopedia article.",
            "title|query:query",
            "look up {0} on wikipedia;wikipedia article about {0};what does wikipedia say about {0}",
            "summary:text",
        ),
    ),
    "office": (
        (
            "send_email|send_mail",
            "Send an e-mail.",
            "to|recipient|address:email subject?:query body|message|text:text",
            'send an email to {0} saying "{2}";email {0} that "{2}";write to {0}: "{2}";mail {0} with the text \'{2}\'',
            "status:word=sent|queued message_id:id",
        ),
        (
            "create_event|add_event|schedule_meeting",
            "Create a calendar event.",
            "title|name:query date|day:date time|start_time?:time",
            'create an event "{0}" on {1};schedule {0} for {1};put "{0}" in my calendar on {1};'
            "add {0} to the calendar on {1}",
            "event_id:id status:word=created|ok",
        ),
        (
            "get_stock_price|stock_price",
            "Get the price of a stock.",
            "symbol|ticker:ticker",
            "what is the stock price of {0};how much is {0} trading at;price of {0};get the price of {0} stock",
            "price:number change:number",
        ),
        (
            "translate_text|translate",
            "Translate a text.",
            "text:text target_language|language|to:language",
            'translate "{0}" to {1};translate \'{0}\' into {1};how do you say "{0}" in {1};what is "{0}" in {1}',
            "translation:text",
        ),
        (
            "calculate|calculator|evaluate",
            "Evaluate an arithmetic expression.",
            "expression|expr:expression",
            "what is {0};calculate {0};compute {0};how much is {0};{0}",
            "result:number",
        ),
        (
            "set_reminder|add_reminder|create_reminder",
            "Set a reminder.",
            "text|message|title:text time|at:time",
            'remind me at {1}: "{0}";set a reminder "{0}" at {1};remind me that "{0}" at {1}',
            "reminder_id:id",
        ),
        (
            "get_order|get_order_status|track_order",
            "Get the status of an order.",
            "order_id|id|order:id",
            "where is my order {0};what is the status of order {0};track order {0};check order {0};status of {0}",
            "status:word=shipped|delivered|pending|lost carrier:word eta:date",
        ),
        (
            "find_customer|get_customer|lookup_user",
            "Find a customer by name.",
            "name|customer:person",
            "find the customer {0};look up {0};find {0};who is {0}",
            "customer_id:id email:email",
        ),
    ),
}


def parameter(spec: str, rng: random.Random) -> Parameter:
    """One parameter from its line, with one of its names."""
    names, _, kind = spec.partition(":")
    kind, _, choices = kind.partition("=")
    name = rng.choice(names.rstrip("?").split("|")) if rng.random() < 0.6 else names.rstrip("?").split("|")[0]
    return Parameter(name, kind, not names.endswith("?"), choices=tuple(choices.split("|")) if choices else ())


def result_field(spec: str) -> Field:
    """One result field from its line."""
    name, _, kind = spec.partition(":")
    kind, _, choices = kind.partition("=")
    return Field(name, kind, tuple(choices.split("|")) if choices else ())


def catalog_tool(row: Row, rng: random.Random) -> Tool:
    """A tool of the catalog under one of its names."""
    names, description, parameters, requests, result = row
    options = names.split("|")
    return Tool(
        options[0] if rng.random() < 0.6 else rng.choice(options),
        description,
        tuple(parameter(spec, rng) for spec in parameters.split()),
        tuple(requests.split(";")),
        tuple(result_field(spec) for spec in result.split()),
    )
