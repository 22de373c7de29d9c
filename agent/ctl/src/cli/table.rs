//! Columns for people.

/// The heading of a column, and what it shows of an item.
type Column<'a, T> = (&'a str, fn(&T) -> String);

/// A row for each item.
pub(crate) fn table<T, const N: usize>(items: &[T], columns: [Column<'_, T>; N]) -> String {
    let rows = items
        .iter()
        .map(|item| columns.map(|(_, cell)| cell(item)).to_vec());
    let rows: Vec<Vec<String>> = rows.collect();
    render(&columns.map(|(heading, _)| heading), &rows)
}

/// Rows under a heading, each column as wide as its widest cell.
fn render(heading: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = heading.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let heading: Vec<String> = heading.iter().map(|cell| (*cell).to_owned()).collect();
    for row in std::iter::once(&heading).chain(rows) {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A list in a cell; `-` for none.
pub(crate) fn list<T: ToString>(items: &[T]) -> String {
    if items.is_empty() {
        return "-".to_owned();
    }
    items
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

/// A cell that may be empty.
pub(crate) fn maybe<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let text = render(
            &["ID", "NAME"],
            &[
                vec!["1".into(), "a".into()],
                vec!["1000".into(), "b".into()],
            ],
        );
        assert_eq!(text, "ID    NAME\n1     a\n1000  b\n");
        assert_eq!(list::<u32>(&[]), "-");
        assert_eq!(list(&[1, 2]), "1,2");
    }
}
