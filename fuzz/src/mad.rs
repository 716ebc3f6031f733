//! Management datagrams and the connection manager's messages.

use userdma_proto::wire::mad::{
    Mad, MadHeader, attribute_name, class_name,
    cm::{BODY_LEN, IpCm, Message},
    method_name,
};

use crate::Choices;

/// One octet of choice, then a MAD. The choice says at which octets of the message every bit is
/// tried: a bit that the reader makes something of goes out again as it came.
pub fn cm_mad(data: &[u8]) {
    let mut choices = Choices::new(data);
    let probe: u8 = choices.any();
    let octets = choices.rest();
    if let Some((attribute, body)) = check_mad(octets) {
        no_bit_is_lost(attribute, body, probe);
    }
    // Whatever the attribute: most inputs name none.
    if octets.len() >= BODY_LEN {
        for attribute in 0x0f..=0x1b {
            let message = Message::parse(attribute, octets).expect("it is long enough");
            assert_eq!(message.is_some(), (0x10..=0x1a).contains(&attribute));
            if let Some(message) = message {
                check_message(attribute, &message);
                no_bit_is_lost(attribute, octets, probe);
            }
        }
    }
    ip_cm(octets);
}

/// Reads a MAD, and returns its message's attribute and body if it has one.
pub(crate) fn check_mad(octets: &[u8]) -> Option<(u16, &[u8])> {
    let mad = match Mad::parse(octets) {
        Ok(mad) => mad,
        Err(error) => {
            assert!(octets.len() < size_of::<MadHeader>(), "{error}");
            return None;
        }
    };
    let (header, body) = (mad.header, mad.body);
    assert_eq!(size_of_val(header) + body.len(), octets.len());
    let (class, attribute) = (header.mgmt_class, header.attribute_id.get());
    let names =
        [class_name(class), method_name(class, header.method), attribute_name(class, attribute)];
    assert!(names.into_iter().flatten().all(|name| !name.is_empty()));
    match mad.cm() {
        Ok(Some(message)) => {
            assert_eq!((class, message.attribute()), (7, attribute));
            check_message(attribute, &message);
            Some((attribute, body))
        }
        Ok(None) => None,
        Err(error) => {
            assert!(body.len() < BODY_LEN && !error.to_string().is_empty());
            None
        }
    }
}

/// What was read goes out, and is read as the same.
pub(crate) fn check_message(attribute: u16, message: &Message<'_>) {
    assert_eq!(message.attribute(), attribute);
    assert!(message.private_data().len() < BODY_LEN);
    let body = message.to_body();
    let again = Message::parse(attribute, &body).expect("a whole body");
    assert_eq!(again.as_ref(), Some(message), "{body:02x?}");
    if let Message::Rej(rej) = message {
        assert!(rej.ari.len() <= 72 && rej.reason.name().is_none_or(|name| !name.is_empty()));
    }
    ip_cm(message.private_data());
}

/// A flipped bit that changes the message changes the same bit of what goes out.
fn no_bit_is_lost(attribute: u16, body: &[u8], probe: u8) {
    let read =
        |body: &[u8]| Message::parse(attribute, body).expect("whole").expect("a message").to_body();
    let out = read(body);
    for at in (usize::from(probe)..BODY_LEN).step_by(32) {
        for bit in 0..8 {
            let mut flipped = body[..BODY_LEN].to_vec();
            flipped[at] ^= 1 << bit;
            let flipped_out = read(&flipped);
            if out == flipped_out {
                let reserved = is_reserved(attribute, at, 1 << bit);
                assert!(reserved, "{attribute:#x}: octet {at}, bit {bit} is lost");
                continue;
            }
            let expected = flipped[at] >> bit & 1;
            assert_eq!(flipped_out[at] >> bit & 1, expected, "octet {at}, bit {bit}");
            assert_eq!(out[at] >> bit & 1, expected ^ 1, "octet {at}, bit {bit}");
        }
    }
}

/// Whether a bit of a message is reserved (IBTA vol. 1, 12.6 to 12.11): octets, and bits of each.
fn is_reserved(attribute: u16, at: usize, bit: u8) -> bool {
    let bits = match (attribute, at) {
        (0x10, 4 | 24..=27)
        | (0x15, 11)
        | (0x17, 6 | 7)
        | (0x19, 8..=11 | 16..=19)
        | (0x1a, 10 | 11) => 0xff,
        (0x10, 90 | 134) | (0x13, 27) | (0x19, 58) => 0x0f,
        (0x10, 91 | 135) | (0x19, 61) => 0xc0,
        (0x10, 94 | 95 | 138) | (0x11, 9) | (0x19, 15 | 62 | 63) => 0x07,
        // SAP supported is beside them.
        (0x10, 139) => 0x03,
        (0x11 | 0x12, 8) => 0x3f,
        (0x12, 9) => 0x01,
        _ => 0,
    };
    bits & bit != 0
}

/// What rdma_cm puts in front of private data.
fn ip_cm(private_data: &[u8]) {
    let Some((header, rest)) = IpCm::parse(private_data) else { return };
    assert_eq!(IpCm::LEN + rest.len(), private_data.len());
    let octets = header.to_bytes();
    let (again, none) = IpCm::parse(&octets).expect("what was read");
    assert_eq!((again, none.len()), (header, 0));
    if let Some((src, dst)) = header.addresses() {
        assert_eq!(src.is_ipv4(), dst.is_ipv4());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bit_of_any_message_is_lost() {
        for attribute in 0x10..=0x1a {
            for probe in 0..32 {
                no_bit_is_lost(attribute, &[0x5a; BODY_LEN], probe);
            }
        }
    }
}
